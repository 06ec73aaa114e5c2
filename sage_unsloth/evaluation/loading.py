"""The engines of the evaluated models, loaded one after another."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sage_unsloth.models.dtypes import chosen_dtype
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.prompts import PromptFormat, row_messages
from sage_unsloth.sampling.engine_errors import engine_errors
from sage_unsloth.sampling.engines import Engine, InBatches, SamplingConfig, TransformersEngine
from sage_unsloth.sampling.record_sets import prompt_ids
from sage_unsloth.sampling.vllm_engine import VllmEngine


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to evaluate.

    Attributes:
        name: in records and figures; specs of one name are training seeds of one method.
        adapter: LoRA folder to apply to it.
        template: one of `prompts.TEMPLATES`; None uses `templates.choose_template`.
        prompt: the prompt format; None uses `templates.choose_format`.
        load_in_4bit: quantise the linear layers' weights.
    """

    name: str
    path: str
    adapter: str | None = None
    template: str | None = None
    prompt: PromptFormat | None = None
    load_in_4bit: bool = False


class IdleEngine(InBatches):
    """The engine of complete sets: it makes prompts, and never samples."""

    def __init__(self, name: str, tokenizer: Any):
        self.name, self.tokenizer = name, tokenizer

    def draw(self, prompts: Sequence, seeds: Sequence, config: SamplingConfig) -> list:
        raise RuntimeError("a complete set asks for no completion")


def spec_dtype(spec: ModelSpec, dtype: str) -> str | None:
    """The dtype of a model; None for quantised weights, whose loader chooses by default."""
    return None if spec.load_in_4bit and dtype == "auto" else chosen_dtype(dtype, spec.path)


def load_engines(
    kind: str,
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    config: SamplingConfig,
    missing: Mapping[tuple[int, str], int],
    *,
    dtype: str = "auto",
    arguments: Mapping[str, Any] | None = None,
) -> Iterator[tuple[int, Engine]]:
    """An engine for each model, one at a time; the caller drops it before requesting the next.

    With vLLM, a base is loaded once for all its adapters.

    Args:
        kind: "transformers" or "vllm".
        models: a model without missing completions is not loaded.
        benchmarks: their prompts decide the maximal sequence length.
        missing: (model's number, benchmark's name) -> missing completions.
        dtype: of the weights, one of `dtypes.DTYPES`.
        arguments: further arguments of `vllm.LLM`.

    Yields:
        The model's number in `models`, and its engine.

    Raises:
        EngineError: an engine cannot be imported, or does not start.
    """
    from sage_unsloth.models.tokenizers import load_tokenizer

    groups: dict[str, list[int]] = defaultdict(list)
    for number, spec in enumerate(models):
        groups[spec.path].append(number)
    if kind == "vllm":
        load = partial(_load_vllm, dtype, arguments or {})
    else:
        load = partial(_load_transformers, dtype)
    for path, numbers in groups.items():
        tokenizers = {
            n: load_tokenizer(path, models[n].template, models[n].adapter, models[n].prompt)
            for n in numbers
        }
        busy = [n for n in numbers if any(missing[n, benchmark.name] for benchmark in benchmarks)]
        for number in numbers:
            if number not in busy:
                yield number, IdleEngine(kind, tokenizers[number])
        if busy:
            problems = [row_messages(row) for benchmark in benchmarks for row in benchmark.rows]
            lengths = [len(prompt_ids(tokenizers[n], turns)) for n in busy for turns in problems]
            length = max(lengths) + config.max_completion_length
            for number, engine in load(path, {n: models[n] for n in busy}, length):
                engine.tokenizer = tokenizers[number]  # vLLM has one for all adapters
                yield number, engine
                del engine


def _load_vllm(
    dtype: str,
    arguments: Mapping[str, Any],
    path: str,
    models: Mapping[int, ModelSpec],
    length: int,
) -> Iterator[tuple[int, Engine]]:
    """One engine, which changes its adapter from model to model."""
    from sage_unsloth.models.device import release_memory

    release_memory()
    adapters = [spec.adapter for spec in models.values() if spec.adapter is not None]
    engine = VllmEngine(path, adapters, length, dtype=dtype, arguments=arguments)
    for number, spec in models.items():
        engine.use(spec.adapter)
        yield number, engine
    del engine
    release_memory()  # for the next base


def _load_transformers(
    dtype: str, path: str, models: Mapping[int, ModelSpec], length: int
) -> Iterator[tuple[int, Engine]]:
    """An engine for each model: its adapter is loaded with it."""
    from sage_unsloth.models.device import release_memory
    from sage_unsloth.models.loading import load_policy

    for number, spec in models.items():
        release_memory()  # of the model before
        with engine_errors(spec.name, "start"):
            policy = load_policy(
                path,
                adapter=spec.adapter,
                max_length=length,
                load_in_4bit=spec.load_in_4bit,
                dtype=spec_dtype(spec, dtype),
                template=spec.template,
                prompt=spec.prompt,
            )
            engine = TransformersEngine(*policy)
            del policy
        yield number, engine
        del engine
