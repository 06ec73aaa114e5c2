"""Samples completions, each from its own random stream: transformers, or vLLM (`vllm_engine`).

With transformers, a completion takes its t-th token by inverting the cumulative distribution at
u[t], the t-th number of the generator with its own seed (`token_streams`). So a row's tokens depend
only on its seed and its logits, whatever else is in the batch. The numbers u are identical in any
batch; the logits only up to rounding, because padding and batch size change the order of sums
(docs/evaluation.md says how often that changes a completion). vLLM takes a seed with each request,
and its logits depend on the batch in the same way. The two engines sample different completions
from one seed.

Shapes: B completions, T tokens at most, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

from sage_unsloth.sampling.token_streams import invert, row_uniforms

Request = tuple[Sequence[int], int]
"""Token ids of a prompt, and the seed of its completion."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling settings; defaults are the paper's evaluation (T 0.3, the rest as in training).

    Attributes:
        num_samples: N, completions of each problem.
        temperature, top_p, min_p: each filter sees the logits divided by the temperature.
        top_k: number of candidate tokens; -1 keeps all.
        max_completion_length: tokens.
        batch_size: completions sampled together; a kill loses about this many.
        grade_seconds: time limit for grading one answer.
        seed: the seed of each completion is derived from it.
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
                "temperature must be > 0 because pass@k needs samples that differ, got "
                f"{self.temperature}. Use .01 for nearly greedy ones"
            )
        for name in ("num_samples", "max_completion_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1 or self.top_k < -1 or not self.top_k:
            raise ValueError(
                "top_p must be in (0, 1], min_p in [0, 1) and top_k -1 or >= 1, got "
                f"top_p={self.top_p}, min_p={self.min_p}, top_k={self.top_k}"
            )


# Completions drawn together where nothing else is asked for; vLLM schedules them by itself.
BATCH_SIZES = {"transformers": SamplingConfig.batch_size, "vllm": 1024}


@dataclass(frozen=True)
class Completion:
    """One completion without its EOS, its finish reason ("stop", by EOS, or "length"), and its
    tokens.
    """

    text: str
    num_tokens: int
    finish_reason: str
    token_ids: tuple[int, ...] = ()


Ended = Callable[[int], object]
"""Called with the number of completions that ended since the last call."""


def ignore(count: int) -> None:
    """No-op `Ended`."""


class Engine(Protocol):
    """Samples completions; `name` is recorded, `tokenizer` makes the prompts.

    `arguments` are those that vLLM was started with, recorded with a set's settings.
    """

    name: str
    tokenizer: Any
    arguments: Mapping[str, Any]

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        """One completion of each prompt (token ids), in order, each with its own seed."""
        ...

    def stream(
        self, requests: Iterable[Request], config: SamplingConfig, ended: Ended = ignore
    ) -> Iterator[tuple[int, Completion]]:
        """(number of the request, its completion) as they end.

        Requests are taken one by one: a caller that stops providing them gets those in flight, then
        the end.
        """
        ...


class InBatches:
    """`stream` for an engine that samples whole batches."""

    arguments: Mapping[str, Any] = MappingProxyType({})

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        raise NotImplementedError

    def stream(
        self, requests: Iterable[Request], config: SamplingConfig, ended: Ended = ignore
    ) -> Iterator[tuple[int, Completion]]:
        waiting, start = iter(requests), 0
        while batch := list(islice(waiting, config.batch_size)):
            drawn = self.draw([ids for ids, _ in batch], [seed for _, seed in batch], config)
            ended(len(batch))
            yield from enumerate(drawn, start)
            start += len(batch)


class TransformersEngine(InBatches):
    """A transformers model on any device; `model.generate` samples batches."""

    name = "transformers"

    def __init__(self, model: Any, tokenizer: Any):
        from sage_unsloth.models.tokenizers import stop_tokens

        self.model, self.tokenizer = model, tokenizer
        self.stops = stop_tokens(model.generation_config, tokenizer)
        model.eval()

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        """One completion of each prompt, in order; a batch lasts as long as its longest one."""
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
                generation_config=settings,
                logits_processor=LogitsProcessorList(processors),
            )
        return [make_completion(tokenizer, row, self.stops) for row in ids[:, length:].tolist()]


def _filters(config: SamplingConfig, pad_token_id: int, device: Any) -> list:
    """transformers' own, in its order: no pad token, temperature, top-k, top-p, min-p."""
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
    """A logits processor that leaves one sampled token per row for greedy decoding."""

    def __init__(self, uniforms_BT: Any, prompt_length: int):
        self.uniforms_BT, self.prompt_length = uniforms_BT, prompt_length

    def __call__(self, input_ids: Any, scores_BV: Any) -> Any:
        import torch

        step = input_ids.shape[1] - self.prompt_length
        tokens_B = invert(torch.softmax(scores_BV.float(), -1), self.uniforms_BT[:, step])
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


def make_completion(tokenizer: Any, ids: Sequence[int], stops: Sequence[int]) -> Completion:
    """Token ids up to the first stop token, as text with special tokens."""
    ids = list(ids)
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    ids = ids[:end]
    reason = "length" if end is None else "stop"
    return Completion(tokenizer.decode(ids), len(ids), reason, tuple(ids))
