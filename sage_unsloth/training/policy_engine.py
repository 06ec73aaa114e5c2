"""Engines that sample from the policy during training without changing the training.

Whatever is sampled between two optimizer steps, the next step is bit-identical: each completion has
its own random stream, and what a generation switches is restored (`preserve_random_state`).
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sage_unsloth.sampling.engines import Engine, TransformersEngine
from sage_unsloth.sampling.vllm_engine import VllmEngine
from sage_unsloth.trainers import switches
from sage_unsloth.trainers.backends import UNSLOTH, backend
from sage_unsloth.trainers.replaced import replace_attributes

SWITCHED = ("training", "gradient_checkpointing", "_flag_for_generation")
"""Attributes of a module that Unsloth's `for_inference` and `model.eval()` set."""


@contextmanager
def policy_engine(trainer: Any, tokenizer: Any, stops: Sequence[int]) -> Iterator[Engine]:
    """Within this context, an engine that samples from the current policy.

    Args:
        trainer: a `GRPOTrainer`, between two optimizer steps.
        tokenizer: makes the prompts; not the trainer's own, which sets its padding side.
        stops: tokens that end a completion, for vLLM.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    with preserve_random_state(model, trainer.processing_class):
        if draws_by_vllm(trainer):
            yield VllmEngine.from_llm(RolloutLlm(trainer.vllm_generation), tokenizer, stops)
        else:
            yield TransformersEngine(model, tokenizer)


def draws_by_vllm(trainer: Any) -> bool:
    """Whether samples come from the vLLM inside Unsloth, which shares the policy's weights."""
    return trainer.use_vllm and backend() == UNSLOTH


@contextmanager
def preserve_random_state(model: Any, tokenizer: Any) -> Iterator[None]:
    """Restores everything that a generation changes.

    The random states of Python, NumPy and PyTorch (every device), `SWITCHED` of each module,
    `use_cache` of each config, the tokenizer's padding side, and Unsloth's environment variables.
    """
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state()
    modules = [
        (module, {name: vars(module)[name] for name in SWITCHED if name in vars(module)})
        for module in model.modules()
    ]
    # By id, because submodules share one config object.
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caches = [(c, vars(c)["use_cache"]) for c in configs.values() if "use_cache" in _vars(c)]
    side = tokenizer.padding_side
    try:
        with torch.random.fork_rng(), switches.forward_returns_logits():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, attributes in modules:
            for name in SWITCHED:
                if name in attributes:
                    setattr(module, name, attributes[name])
                # Set during generation and not there before.
                elif name in vars(module):
                    delattr(module, name)
        for config, use_cache in caches:
            config.use_cache = use_cache
        tokenizer.padding_side = side


def _vars(config: Any) -> dict[str, Any]:
    return getattr(config, "__dict__", {})


class RolloutLlm:
    """vLLM's `generate` through the trainer's own rollout function.

    That function wakes the engine, loads the current adapter and puts the engine to sleep. Only the
    sampling parameters are replaced, so that each completion has its own seed. Not run on a GPU.
    """

    def __init__(self, generation: Any) -> None:
        self.generation = generation

    def generate(self, prompts: Sequence[dict], parameters: Sequence[Any], **_: Any) -> list:
        llm, outputs = self.generation.llm, []
        plain = llm.generate

        def generate(prompts: Any, sampling_params: Any = None, **options: Any) -> list:
            outputs.extend(plain(prompts, sampling_params=list(parameters), **options))
            return outputs

        # The rollout function makes its own sampling parameters, so they are replaced on the way.
        with replace_attributes(llm, generate=generate):
            self.generation.generate(
                prompts=[prompt["prompt_token_ids"] for prompt in prompts],
                images=None,
                num_generations=1,
            )
        return outputs
