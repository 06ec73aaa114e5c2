"""Evaluates models on benchmarks: draws and grades what is missing, a part at a time, and reports
(`compare`).
"""

import contextlib
import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.record_tables import record_set
from sage_unsloth.evaluation.report import report
from sage_unsloth.figures import write_table
from sage_unsloth.grading.grader import Grader
from sage_unsloth.models.device import frees_models, has_gpu
from sage_unsloth.models.weights import check_adapter_fits, model_identity
from sage_unsloth.problems.benchmarks import Benchmark, check_golds, load_benchmark
from sage_unsloth.problems.overlap import overlap
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.text import file_name
from sage_unsloth.sampling.engine_choice import choose_rollouts
from sage_unsloth.sampling.engines import Engine, SamplingConfig, TransformersEngine, VllmEngine
from sage_unsloth.sampling.record_sets import (
    EngineError,
    prompt_ids,
    read_samples,
    read_settings,
    refuse_other_set,
    sample_and_grade,
    sample_seed,
    set_settings,
    settings_path,
)

PROBE_TOKENS = 16  # of each completion of the probe that the estimate of time is made from
BATCH_SIZES = {"transformers": 64, "vllm": 1024}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to evaluate.

    Attributes:
        name: in records and figures; specs of one name are training seeds of one method.
        path: model folder or hub id.
        adapter: LoRA folder to put on it.
    """

    name: str
    path: str
    adapter: str | None = None


def parse_model(text: str) -> ModelSpec:
    """`NAME=PATH` or `NAME=PATH+ADAPTER`.

    Raises:
        ValueError: another form, or an unsuitable name.
    """
    name, equals, path = text.partition("=")
    if not equals or not path or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            "a model must be NAME=PATH or NAME=PATH+ADAPTER, the name of letters, digits, '.', "
            "'-' and '_'; "
            f"got {text!r}; for example sft=runs/sft/model grpo=runs/sft/model+runs/grpo/adapter"
        )
    adapter = None
    if "+" in path and not Path(path).exists():
        path, _, adapter = path.partition("+")
    return ModelSpec(name=name, path=path, adapter=adapter)


def parse_benchmark(
    text: str, data: str | Path | None = None, problems: int | None = None
) -> Benchmark:
    """`NAME`, from the hub or the folder `data`, or `NAME=FILE`; only the first `problems` where
    that is given.

    Raises:
        ValueError: as `load_benchmark`; or `problems` < 1.
    """
    name, _, file = text.partition("=")
    benchmark = load_benchmark(name, file or data)
    if problems is None:
        return benchmark
    if problems < 1:
        raise ValueError(f"--problems must be >= 1; got {problems}")
    return replace(benchmark, rows=benchmark.rows[:problems])


def choose_engine(wanted: str = "auto") -> str:
    """vLLM where it runs, else transformers, with the reason said aloud; "vllm" insists."""
    return choose_rollouts(wanted)


@frees_models
def evaluate(
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    out: str | Path,
    config: SamplingConfig,
    *,
    engine: str = "transformers",
    training: Sequence[dict] = (),
    against: str | None = None,
) -> dict[str, Any]:
    """Draw and grade what is missing of every model on every benchmark, and report.

    Record sets lie in `out/samples/BENCHMARK/MODEL.jsonl`; a second run draws only what is missing
    there.

    Args:
        models: specs of one name are training seeds of one method.
        benchmarks: what they are asked.
        out: folder.
        config: sampling.
        engine: "transformers" or "vllm".
        training: rows with `problem`, to look for in the benchmarks.
        against: the model that the others are compared with; None takes the first.

    Raises:
        ValueError: bad input, named before anything is drawn.
        EngineError: the engine failed; a second run goes on from there.
    """
    from tqdm.auto import tqdm

    out = Path(out)
    names = list(dict.fromkeys(spec.name for spec in models))
    if against is not None and against not in names:
        raise ValueError(f"--against must be one of {', '.join(names)}; got {against!r}")
    identities = []
    _check_request(models, benchmarks)
    for spec in models:
        if spec.adapter is not None:
            check_adapter_fits(spec.path, spec.adapter)
        identities.append(
            model_identity(spec.path, spec.adapter) | {"device": "cuda" if has_gpu() else "cpu"}
        )
    files = _files(models, benchmarks, out, identities)
    for number, spec in enumerate(models):
        for benchmark in benchmarks:
            settings = set_settings(config, engine, spec.name, benchmark.name, identities[number])
            refuse_other_set(files[number, benchmark.name], settings)
    with locked(out), contextlib.ExitStack() as stack:
        out.mkdir(parents=True, exist_ok=True)
        for benchmark in benchmarks:
            with Grader(2, config.grade_seconds, boxed=True, checker=benchmark.checker) as grader:
                check_golds(benchmark, grader)
        _report_overlap(training, benchmarks, out)
        named = {benchmark.name: benchmark for benchmark in benchmarks}
        left = {key: _count_missing(file, named[key[1]], config) for key, file in files.items()}
        total = sum(len(b.rows) for b in benchmarks) * config.num_samples * len(models)
        print(
            f"{len(models)} models x {sum(len(b.rows) for b in benchmarks)} problems x "
            f"{config.num_samples} samples = "
            f"{total:,} completions; {total - sum(left.values()):,} of them are in "
            f"{out / 'samples'}"
        )
        bar, sets = None, {}
        for number, loaded in _engines(engine, models, benchmarks, config, left):
            spec = models[number]
            missing = [benchmark for benchmark in benchmarks if left[number, benchmark.name]]
            if missing and bar is None:
                with _engine_errors(spec.name):
                    print(_estimate(loaded, missing[0], config, sum(left.values())))
            if bar is None:
                bar = tqdm(total=total, initial=total - sum(left.values()), unit="completion")
                stack.enter_context(bar)
            for benchmark in benchmarks:
                bar.set_description(f"{spec.name} on {benchmark.name}")
                records = sample_and_grade(
                    config,
                    loaded,
                    benchmark.rows,
                    files[number, benchmark.name],
                    model=spec.name,
                    benchmark=benchmark.name,
                    identity=identities[number],
                    provenance=benchmark.provenance,
                    checker=benchmark.checker,
                    bar=bar,
                )
                sets[number, benchmark.name] = record_set(
                    records, spec.name, benchmark.name, asdict(config)
                )
            del loaded  # its memory is needed for the next one
        ordered = [sets[number, b.name] for b in benchmarks for number in range(len(models))]
        return report(ordered, out, against)


@contextlib.contextmanager
def _engine_errors(name: str) -> Iterator[None]:
    """Gives what an engine raises while it starts a remedy; engines fail by classes of their
    own.
    """
    try:
        yield
    except (ValueError, EngineError):
        raise  # said by us already
    except Exception as error:
        raise EngineError(
            f"the engine of {name} must start; it failed: {type(error).__name__}: "
            f"{error!s:.500}; if memory ran out, end what "
            "else holds the card, take a smaller --batch, or --engine transformers"
        ) from error


def _check_request(models: Sequence[ModelSpec], benchmarks: Sequence[Benchmark]) -> None:
    names = [spec.name for spec in models]
    if not models or not benchmarks or len({b.name for b in benchmarks}) < len(benchmarks):
        raise ValueError(
            f"an evaluation needs models and different benchmarks; got {names} and "
            f"{[b.name for b in benchmarks]}"
        )
    if len(set(models)) < len(models):
        raise ValueError(f"models of one name must differ, as training seeds do; got {names}")


def _files(
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    out: Path,
    identities: Sequence[dict[str, Any]],
) -> dict[tuple[int, str], Path]:
    """The record set of each model (by its number) on each benchmark.

    NAME.jsonl, and NAME.DIGEST.jsonl where training seeds share a name; a set that is there under
    either keeps its file.
    """
    names = [spec.name for spec in models]
    files = {}
    for number, name in enumerate(names):
        weights = (identities[number]["weights"], identities[number]["adapter"])
        digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:8]
        for benchmark in benchmarks:
            folder = out / "samples" / file_name(benchmark.name)
            alone, shared = folder / f"{name}.jsonl", folder / f"{name}.{digest}.jsonl"
            own = False
            if settings_path(alone).is_file():
                settings = read_settings(alone)["settings"]
                own = weights == (settings.get("weights"), settings.get("adapter"))
            # Alone, another model of the name is refused by its settings; as a seed among others it
            # has its own file.
            own = own or (names.count(name) == 1 and not settings_path(shared).is_file())
            files[number, benchmark.name] = alone if own else shared
    return files


def _count_missing(file: Path, benchmark: Benchmark, config: SamplingConfig) -> int:
    wanted = {(row["id"], sample) for row in benchmark.rows for sample in range(config.num_samples)}
    records = read_samples(file) if file.exists() else []
    return len(wanted - {(record["problem_id"], record["sample"]) for record in records})


def _report_overlap(training: Sequence[dict], benchmarks: Sequence[Benchmark], out: Path) -> None:
    """Says which problems share eight words in a row with the training set, and writes them
    down.
    """
    if not training:
        return
    rows = []
    for benchmark in benchmarks:
        found = overlap(training, benchmark)
        rows += [{"benchmark": benchmark.name} | row for row in found]
        whole = sum(row["shared"] == 1 for row in found)
        print(
            f"{benchmark.name}: {len(found)} of {len(benchmark.rows)} problems share eight words "
            f"in a row with the training "
            f"set, {whole} stand in it word for word"
        )
    write_table(out / "overlap.csv", rows)


class _Idle:
    """The engine of sets that are complete: it makes prompts, and is never asked to draw."""

    def __init__(self, name: str, tokenizer: Any):
        self.name, self.tokenizer = name, tokenizer

    def draw(self, prompts: Sequence, seeds: Sequence, config: SamplingConfig) -> list:
        raise RuntimeError("a complete set asks for no completion")


def _engines(
    kind: str,
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    config: SamplingConfig,
    left: dict[tuple[int, str], int],
) -> Iterator[tuple[int, Engine]]:
    """An engine for each model (by its number); a base is loaded once, and not at all where nothing
    is missing.
    """
    from sage_unsloth.models.device import release_memory
    from sage_unsloth.models.loading import load_policy
    from sage_unsloth.models.tokenizers import load_tokenizer

    groups: dict[str, list[int]] = defaultdict(list)
    for number, spec in enumerate(models):
        groups[spec.path].append(number)
    for path, numbers in groups.items():
        tokenizer = load_tokenizer(path)
        busy = [n for n in numbers if any(left[n, benchmark.name] for benchmark in benchmarks)]
        for number in numbers:
            if number not in busy:
                yield number, _Idle(kind, tokenizer)
        if not busy:
            continue
        prompts = (prompt_ids(tokenizer, row["problem"]) for b in benchmarks for row in b.rows)
        length = max(map(len, prompts)) + config.max_completion_length
        if kind == "vllm":
            release_memory()
            adapters = [models[n].adapter for n in busy if models[n].adapter]
            with _engine_errors(models[busy[0]].name):
                loaded = VllmEngine(path, adapters, length)
            for number in busy:
                loaded.use(models[number].adapter)
                yield number, loaded
            del loaded
            release_memory()  # for the next base
        else:
            for number in busy:
                release_memory()  # of the model before
                adapter = models[number].adapter
                with _engine_errors(models[number].name):
                    loaded = TransformersEngine(
                        *load_policy(path, adapter=adapter, max_length=length)
                    )
                yield number, loaded
                del loaded


def _estimate(engine: Engine, benchmark: Benchmark, config: SamplingConfig, missing: int) -> str:
    """How long it will take at most, from the pace of a few tokens of one batch."""
    count = min(config.batch_size, missing)
    rows = [benchmark.rows[i * len(benchmark.rows) // count] for i in range(count)]
    seeds = [sample_seed(config.seed, row["id"], 0) for row in rows]
    short = replace(config, max_completion_length=min(PROBE_TOKENS, config.max_completion_length))
    started = time.perf_counter()
    drawn = engine.draw(
        [prompt_ids(engine.tokenizer, row["problem"]) for row in rows], seeds, short
    )
    pace = sum(c.num_tokens + 1 for c in drawn) / (time.perf_counter() - started)
    minutes = missing * config.max_completion_length / pace / 60
    return (
        f"Estimate: {minutes:.{0 if minutes > 10 else 1}f} min for drawing, if each of the "
        f"{missing:,} missing completions takes all "
        f"{config.max_completion_length} tokens ({pace:,.0f} tokens/s in a probe of {count} "
        f"completions); the bar knows better "
        "after the first batches. Stop it whenever you like: the same command goes on."
    )
