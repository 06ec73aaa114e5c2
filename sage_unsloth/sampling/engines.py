"""Draws completions, each from a random stream of its own: by transformers, or by vLLM
(`vllm_engine`).

With transformers, a completion takes its t-th token by inverting the cumulative distribution at
u[t], the t-th number of the generator that its own seed starts (`token_streams`). So what a row
draws is a function of its seed and of its logits alone, whatever else is in the batch. The numbers
u are exactly the same in any batch; the logits are so up to rounding, because padding and batch
size change the order in which sums are formed (docs/evaluation.md says how often that changes
a completion). vLLM takes a seed with each request, and its logits depend on the batch in the same
way. The two engines draw different completions from one seed.

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
    """How completions are drawn; the values are the paper's evaluation (T 0.3, the rest as in
    training).

    Attributes:
        num_samples: N, completions of each problem.
        temperature, top_p, min_p: sampling; each filter sees the logits divided by the temperature.
        top_k: how many tokens may be drawn; -1 keeps all.
        max_completion_length: tokens.
        batch_size: completions drawn together; a kill loses about so many.
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
    """One completion without its EOS, why it ended ("stop", by EOS, or "length"), and the tokens
    that were sampled.
    """

    text: str
    num_tokens: int
    finish_reason: str
    token_ids: tuple[int, ...] = ()


Ended = Callable[[int], object]
"""Is told how many completions have ended since it was told last."""


def ignore(count: int) -> None:
    """Who wants no `Ended`."""


class Engine(Protocol):
    """What draws completions; `name` is in the record, `tokenizer` makes the prompts.

    `arguments` is what vLLM was started with, which is noted beside the settings of a record set.
    """

    name: str
    tokenizer: Any
    arguments: Mapping[str, Any]

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        """One completion of each prompt (token ids), in order, each by its own seed."""
        ...

    def stream(
        self, requests: Iterable[Request], config: SamplingConfig, ended: Ended = ignore
    ) -> Iterator[tuple[int, Completion]]:
        """(the request's number, its completion) as they end; requests are taken as there is room,
        so that a caller that stops giving some gets what is in flight, and then the end.
        """
        ...


class InBatches:
    """The `stream` of an engine that draws whole batches."""

    arguments: Mapping[str, Any] = MappingProxyType({})

    def draw(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], config: SamplingConfig
    ) -> list[Completion]:
        """See `Engine`."""
        raise NotImplementedError

    def stream(
        self, requests: Iterable[Request], config: SamplingConfig, ended: Ended = ignore
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine`."""
        waiting, start = iter(requests), 0
        while batch := list(islice(waiting, config.batch_size)):
            drawn = self.draw([ids for ids, _ in batch], [seed for _, seed in batch], config)
            ended(len(batch))
            yield from enumerate(drawn, start)
            start += len(batch)


class TransformersEngine(InBatches):
    """A model of transformers, on whatever device it is; `model.generate` draws batches."""

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
        return [completion_of(tokenizer, row, self.stops) for row in ids[:, length:].tolist()]


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


def completion_of(tokenizer: Any, ids: Sequence[int], stops: Sequence[int]) -> Completion:
    """Token ids up to the first that ends a completion, as text; special tokens stay in it."""
    ids = list(ids)
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    ids = ids[:end]
    reason = "length" if end is None else "stop"
    return Completion(tokenizer.decode(ids), len(ids), reason, tuple(ids))
