"""Draws completions by vLLM's offline engine, which fills the places of those that end itself."""

import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sage_unsloth.models.weights import adapter_config
from sage_unsloth.sampling.engines import (
    Completion,
    Ended,
    InBatches,
    SamplingConfig,
    completion_of,
    ignore,
)
from sage_unsloth.sampling.refilling import Request


class VllmEngine(InBatches):
    """vLLM's offline engine: the base model loaded once, adapters changed by request.

    Args:
        path: model folder or hub id.
        adapters: every LoRA folder that `use` will be given.
        max_length: prompt and completion together, tokens.
        memory_share: of the GPU's memory, for weights and cache.
    """

    name = "vllm"
    fills_places = True

    def __init__(
        self,
        path: str | Path,
        adapters: Sequence[str | Path] = (),
        max_length: int = 4096,
        memory_share: float = 0.9,
    ):
        from vllm import LLM

        from sage_unsloth.models.tokenizers import load_stop_tokens, load_tokenizer

        self.tokenizer = load_tokenizer(path)
        self.stops = load_stop_tokens(path, self.tokenizer)
        self.llm = LLM(model=str(path), **engine_arguments(adapters, max_length, memory_share))
        self.adapters = [str(adapter) for adapter in adapters]
        self.lora_request: Any = None

    @classmethod
    def around(cls, llm: Any, tokenizer: Any, stops: Sequence[int]) -> "VllmEngine":
        """The engine that a model for RL has already, without an adapter: the start of training."""
        engine = cls.__new__(cls)
        engine.llm, engine.tokenizer, engine.stops = llm, tokenizer, list(stops)
        engine.adapters, engine.lora_request = [], None
        return engine

    def use(self, adapter: str | Path | None) -> None:
        """Draw by this adapter from now on, or by the base model for None."""
        self.lora_request = None if adapter is None else lora_request(self.adapters, adapter)

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        config: SamplingConfig,
        ended: Ended = ignore,
    ) -> list[Completion]:
        """One completion of each prompt, in order; see `Engine`."""
        # Equal prompts are neighbours here, and vLLM's prefix cache computes them once.
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts],
            [request_parameters(self.tokenizer, self.stops, seed, config) for seed in seeds],
            lora_request=self.lora_request,
            use_tqdm=partial(reporting_bar, ended),
        )
        return [
            completion_of(self.tokenizer, output.outputs[0].token_ids, self.stops)
            for output in outputs
        ]

    def stream(
        self, requests: Iterable[Request], config: SamplingConfig, ended: Ended = ignore
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine`. A call of vLLM draws `batch_size` completions and fills places by itself;
        `ended` is told meanwhile.
        """
        waiting, start = iter(requests), 0
        while batch := list(islice(waiting, config.batch_size)):
            prompts, seeds = zip(*batch, strict=True)
            yield from enumerate(self.draw(prompts, seeds, config, ended), start)
            start += len(batch)


def reporting_bar(ended: Ended, iterable: Iterable | None = None, **options: Any) -> Any:
    """What `LLM.generate` takes for its bars (`use_tqdm`): shows nothing, and tells `ended`.

    vLLM makes one bar around the requests that it adds, and one that it advances by each that ends,
    whose `n`, `postfix` and elapsed time it reads.

    Args:
        ended: told of each completion.
        iterable: the requests, for the first.
        options: tqdm's.
    """
    if iterable is not None:
        return iterable
    from tqdm import tqdm

    class Reporting(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            ended(int(n or 0))
            return super().update(n)

    # A disabled one has no `n` and no elapsed time.
    return Reporting(**options | {"file": io.StringIO(), "mininterval": 3600, "leave": False})


def engine_arguments(
    adapters: Sequence[str | Path], max_length: int, memory_share: float
) -> dict[str, Any]:
    """What `vllm.LLM` is given beside the model."""
    arguments: dict[str, Any] = {
        "max_model_len": max_length,
        "gpu_memory_utilization": memory_share,
        "enable_prefix_caching": True,
        "generation_config": "vllm",  # not the model's own defaults, a repetition penalty say
        "seed": 0,
    }
    if adapters:
        ranks = [adapter_config(adapter)["r"] for adapter in adapters]
        # vLLM knows ranks of 8, 16, 32 and so on.
        rank = max(8, 1 << (max(ranks) - 1).bit_length())
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        arguments["max_cpu_loras"] = len(adapters)
    return arguments


def lora_request(adapters: Sequence[str], adapter: str | Path) -> Any:
    """vLLM's request for one of the adapters; ids begin at 1, in the order of `adapters`."""
    from vllm.lora.request import LoRARequest

    number = adapters.index(str(adapter)) + 1
    return LoRARequest(f"adapter-{number}", number, str(adapter))


def request_parameters(
    tokenizer: Any, stops: Sequence[int], seed: int, config: SamplingConfig
) -> Any:
    """vLLM's `SamplingParams` of one completion."""
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        seed=seed,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_completion_length,
        stop_token_ids=list(stops),
        logit_bias={tokenizer.pad_token_id: -100.0},  # as the pad token is suppressed in training
        detokenize=False,  # texts are decoded as with transformers
    )
