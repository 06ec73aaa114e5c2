"""Draws completions, each from a random stream of its own: by vLLM, or by transformers anywhere.

With transformers, completion i of a batch takes its t-th token by inverting the cumulative
distribution at u[i, t], the t-th number of the generator that its own seed starts. So what a row
draws is a function of its seed and of its logits alone, whatever else is in the batch. The numbers
u are exactly the same in any batch; the logits are so up to rounding, because padding and batch
size change the order in which sums are formed (`lab.grading_speed` measures how often that changes
a completion). vLLM takes a seed with each request, and its logits depend on the batch in the same
way. The two engines draw different completions from one seed.

Shapes: B completions, T tokens at most, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sage_unsloth.models.weights import adapter_config

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn; the values are the paper's evaluation (T 0.3, the rest as in
    training).

    Attributes:
        num_samples: N, completions of each problem.
        temperature, top_p, min_p: sampling; each filter sees the logits divided by the temperature.
        top_k: how many tokens may be drawn; -1 keeps all.
        max_completion_length: tokens.
        batch_size: completions drawn together and written at once; a kill loses one batch at most.
        grade_seconds: time limit for grading one answer.
        seed: from which the seed of each completion is derived.
    """

    num_samples: int = 256
    temperature: float = 0.3
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.01
    max_completion_length: int = 1024
    batch_size: int = 64
    grade_seconds: float = 5.0
    seed: int = 3407

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                "temperature must be > 0 because pass@k needs samples that differ; "
                f"got {self.temperature}; take .01 for nearly greedy ones"
            )
        for name in ("num_samples", "max_completion_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1; got {getattr(self, name)}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1 or self.top_k < -1 or not self.top_k:
            raise ValueError(
                "top_p must be in (0, 1], min_p in [0, 1) and top_k -1 or >= 1; "
                f"got top_p={self.top_p}, min_p={self.min_p}, top_k={self.top_k}"
            )


# Completions drawn together where nothing else is asked for; vLLM schedules them by itself.
BATCH_SIZES = {"transformers": SamplingConfig.batch_size, "vllm": 1024}


@dataclass(frozen=True)
class Completion:
    """One completion without its EOS, and why it ended: "stop" (EOS) or "length"."""

    text: str
    num_tokens: int
    finish_reason: str


class Engine(Protocol):
    """What draws completions; `name` is in the record, `tokenizer` makes the prompts."""

    name: str
    tokenizer: Any

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        """One completion of each prompt (token ids), in order, each by its own seed."""
        ...


class TransformersEngine:
    """`model.generate`, on whatever device the model is."""

    name = "transformers"

    def __init__(self, model: Any, tokenizer: Any):
        from sage_unsloth.models.tokenizers import stop_tokens

        self.model, self.tokenizer = model, tokenizer
        self.stops = stop_tokens(model.generation_config, tokenizer)
        model.eval()

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        """One completion of each prompt, in order; see `Engine`."""
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        tokenizer, device = self.tokenizer, self.model.device
        inputs = tokenizer.pad({"input_ids": [list(ids) for ids in prompts]}, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        uniforms = torch.from_numpy(row_uniforms(seeds, config.max_completion_length)).to(device)
        processors = [*_filters(config, tokenizer.pad_token_id, device), _Draw(uniforms, length)]
        # A model's own generation_config may set any of these, a repetition penalty say.
        settings = GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=config.max_completion_length,
            eos_token_id=self.stops,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.inference_mode():
            ids = self.model.generate(
                **inputs.to(device),
                past_key_values=self._shared_prompt(prompts),
                generation_config=settings,
                logits_processor=LogitsProcessorList(processors),
            )
        return [_completion(tokenizer, row, self.stops) for row in ids[:, length:].tolist()]

    def _shared_prompt(self, prompts: Sequence[Sequence[int]]) -> Any:
        """The cache of a prompt that all rows share, without its last token, or None.

        Only for transformers' own forward pass: on a GPU Unsloth replaces it by one with a cache of
        its own.
        """
        import torch

        same = (
            len(prompts) > 1 and len(prompts[0]) > 1 and all(ids == prompts[0] for ids in prompts)
        )
        if not same or self.model.device.type != "cpu":
            return None
        cache = self.model(torch.tensor([prompts[0][:-1]]), use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(prompts))
        return cache


def row_uniforms(seeds: Sequence[int], length: int) -> "np.ndarray":
    """(B, T) numbers in [0, 1), float64: row i is the stream that seed i starts."""
    import numpy as np

    return np.stack([np.random.Generator(np.random.Philox(seed)).random(length) for seed in seeds])


def _filters(config: SamplingConfig, pad_token_id: int, device: Any) -> list:
    """transformers' own: no pad token, temperature, top-k, top-p, min-p, in its own order."""
    from transformers.generation import logits_process as processors

    filters: list[Any] = [processors.SuppressTokensLogitsProcessor([pad_token_id], device=device)]
    if config.temperature != 1:
        filters.append(processors.TemperatureLogitsWarper(config.temperature))
    if config.top_k > 0:
        filters.append(processors.TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        filters.append(processors.TopPLogitsWarper(config.top_p))
    if config.min_p > 0:
        filters.append(processors.MinPLogitsWarper(config.min_p))
    return filters


class _Draw:
    """A logits processor that leaves each row one drawn token: the greedy choice is a sample."""

    def __init__(self, uniforms_BT: Any, prompt_length: int):
        self.uniforms_BT, self.prompt_length = uniforms_BT, prompt_length

    def __call__(self, input_ids: Any, scores_BV: Any) -> Any:
        import torch

        step = input_ids.shape[1] - self.prompt_length
        tokens_B = invert(torch.softmax(scores_BV.float(), -1), self.uniforms_BT[:, step])
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


def invert(probabilities_BV: Any, uniforms_B: Any) -> Any:
    """The first token at which the cumulative probability exceeds u.

    Args:
        probabilities_BV: (B, V); a token of probability 0 is never drawn.
        uniforms_B: (B,) u in [0, 1), float64.

    Returns:
        (B,) token ids.
    """
    import torch

    cumulative_BV = probabilities_BV.double().cumsum(-1)
    # u <= 1 - 2**-53, so in float64 u times the total is below the total.
    target_B = uniforms_B * cumulative_BV[:, -1]
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]


def _completion(tokenizer: Any, ids: Sequence[int], stops: Sequence[int]) -> Completion:
    """Token ids up to the first that ends a completion, as text; special tokens stay in it."""
    ids = list(ids)
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    return Completion(
        tokenizer.decode(ids[:end]), len(ids[:end]), "length" if end is None else "stop"
    )


class VllmEngine:
    """vLLM's offline engine: the base model loaded once, adapters changed by request.

    Args:
        path: model folder or hub id.
        adapters: every LoRA folder that `use` will be given.
        max_length: prompt and completion together, tokens.
        memory_share: of the GPU's memory, for weights and cache.
    """

    name = "vllm"

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
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        """One completion of each prompt, in order; see `Engine`."""
        # Equal prompts are neighbours here, and vLLM's prefix cache computes them once.
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts],
            [request_parameters(self.tokenizer, self.stops, seed, config) for seed in seeds],
            lora_request=self.lora_request,
            use_tqdm=False,
        )
        return [
            _completion(self.tokenizer, output.outputs[0].token_ids, self.stops)
            for output in outputs
        ]


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
