"""Evaluates models on benchmarks: draws and grades what is missing, and reports (`report`)."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sage_unsloth.evaluation.loading import ModelSpec, dtype_of, load_engines
from sage_unsloth.evaluation.pace import before_first_report, estimate
from sage_unsloth.evaluation.record_tables import RecordSet, keep_texts, record_set
from sage_unsloth.evaluation.report import report_sets
from sage_unsloth.evaluation.trained_on import trained_on
from sage_unsloth.figures import write_table
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.models.device import frees_models, has_gpu
from sage_unsloth.models.embedded import is_small, settle_process
from sage_unsloth.models.templates import choose_format
from sage_unsloth.models.tokenizers import template_for
from sage_unsloth.models.weights import check_adapter_fits, model_identity
from sage_unsloth.patch.backends import load_backend
from sage_unsloth.problems.benchmarks import Benchmark, check_golds, load_benchmark
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.near_copies import near_copies
from sage_unsloth.problems.overlap import overlap
from sage_unsloth.problems.published import PUBLISHED, TOGETHER
from sage_unsloth.prompts import PROJECT_PROMPT, turns_of
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.text import file_name
from sage_unsloth.sampling.engine_arguments import check_temperature, not_free
from sage_unsloth.sampling.engine_choice import choose_rollouts
from sage_unsloth.sampling.engine_errors import engine_errors
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.sampling.record_files import (
    read_samples,
    read_settings,
    refuse_other_set,
    set_settings,
    settings_path,
)
from sage_unsloth.sampling.record_sets import asked_in, sample_and_grade

logger = logging.getLogger(__name__)

KNOWN = (*PUBLISHED, *TOGETHER)
Key = tuple[int, str]
"""A model by its number, since training seeds share a name, and a benchmark by its name."""


def check_columns_are_used(texts: Sequence[str], columns: Columns) -> None:
    """Refuses `--columns` and the like where no benchmark is a file of one's own."""
    own = [text for text in texts if "=" in text and text.partition("=")[0] not in KNOWN]
    if columns and not own:
        raise ValueError(
            "--columns, --answer-pattern and --split are for problems of your own, NAME=FILE with "
            f"a name of yours; got {' '.join(texts)}, whose columns are known; leave them out"
        )


def parse_benchmark(
    text: str,
    data: str | Path | None = None,
    problems: int | None = None,
    columns: Columns | None = None,
) -> Benchmark:
    """`NAME`, from the hub or the folder `data`, or `NAME=FILE`.

    Args:
        text: see above.
        data: folder of local copies.
        problems: keep the first so many; None keeps all.
        columns: how problems of one's own are read.

    Raises:
        ValueError: as `load_benchmark`; or `problems` < 1.
    """
    name, _, file = text.partition("=")
    benchmark = load_benchmark(name, file or data, columns=columns)
    if problems is None:
        return benchmark
    if problems < 1:
        raise ValueError(f"--problems must be >= 1; got {problems}")
    return replace(benchmark, rows=benchmark.rows[:problems])


def choose_engine(wanted: str = "auto", *, load_in_4bit: bool = False) -> str:
    """vLLM where it runs, else transformers, with the reason logged; "vllm" insists.

    Raises:
        ValueError: an unknown engine, or vLLM where it cannot run or with 4-bit weights.
    """
    if load_in_4bit and wanted == "vllm":
        raise ValueError(
            "4-bit weights are drawn from by transformers, because vLLM loads 16-bit ones here; "
            "got --engine vllm for a model that was trained in 4 bits, or with --load-in-4bit; "
            "leave it out, or add --no-load-in-4bit"
        )
    return choose_rollouts("transformers" if load_in_4bit else wanted)


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
    dtype: str = "auto",
    engine_arguments: Mapping[str, Any] | None = None,
    show: Callable[[str], object] = logger.info,
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
        dtype: format of the weights, "auto" (each model's own), "float32", "bfloat16" or
            "float16"; recorded.
        engine_arguments: further arguments of vLLM's engine; those on which results depend tell
            its record sets from others, and all are noted beside the set's settings.
        show: is given how much there is to do and how long it may take, a text at a time.

    Raises:
        ValueError: bad input, named before anything is drawn.
        EngineError: the engine failed; a second run resumes from there.
    """
    out = Path(out)
    check_temperature(engine, config.temperature)
    _check_request(models, benchmarks, against)
    models = [
        replace(spec, prompt=choose_format(spec.path, spec.prompt, spec.adapter)) for spec in models
    ]
    if engine != "vllm" and engine_arguments:
        raise ValueError(
            "engine arguments are vLLM's; got "
            f"{', '.join(engine_arguments)} with engine {engine}; leave them out, or take vllm"
        )
    _say_precisions(models, show)
    for warning in trained_on(models, benchmarks):
        show(warning)
    identities = _identities(models, dtype, engine_arguments or {})
    files = _files(models, benchmarks, out, identities)
    templates = {}  # of the models that have a set already
    for (number, benchmark), file in files.items():
        if not (settings_path(file).exists() or file.exists()):
            continue
        recorded = read_settings(file)["settings"].get("template", "project")
        templates[number] = models[number].template or recorded
        identity = identities[number] | {"template": templates[number]}
        settings = set_settings(config, engine, models[number].name, benchmark, identity)
        refuse_other_set(file, settings)
    with locked(out):
        out.mkdir(parents=True, exist_ok=True)
        for benchmark in benchmarks:
            with Grader(2, config.grade_seconds, boxed=True, checker=benchmark.checker) as grader:
                if benchmark.checker is not MATH:
                    grader.check_workers()
                _report_golds(check_golds(benchmark, grader), benchmark, out, show)
        if training:
            _report_overlap(training, benchmarks, out, show)
        missing = _count_missing(files, benchmarks, config)
        if any(missing.values()):
            if engine == "transformers":
                load_backend()  # before transformers, whose tokenizers the templates are read from
            if all(is_small(spec.path) for spec in models):
                settle_process()
        models = _with_templates(models, templates, show)
        for identity, spec in zip(identities, models, strict=True):
            identity["template"] = spec.template
        loading = {"dtype": dtype, "arguments": engine_arguments}
        sets = _draw_sets(
            models, benchmarks, out, config, engine, loading, identities, files, missing, show
        )
        ordered = [sets[number, b.name] for b in benchmarks for number in range(len(models))]
        return report_sets(ordered, out, against)


def _check_request(
    models: Sequence[ModelSpec], benchmarks: Sequence[Benchmark], against: str | None
) -> None:
    names = [spec.name for spec in models]
    if against is not None and against not in names:
        known = ", ".join(dict.fromkeys(names))
        raise ValueError(f"--against must be one of {known}; got {against!r}")
    if not models or not benchmarks or len({b.name for b in benchmarks}) < len(benchmarks):
        raise ValueError(
            f"an evaluation needs models and different benchmarks; got {names} and "
            f"{[b.name for b in benchmarks]}"
        )
    if len(set(models)) < len(models):
        raise ValueError(f"models of one name must differ, as training seeds do; got {names}")


def _say_precisions(models: Sequence[ModelSpec], show: Callable[[str], object]) -> None:
    """A comparison of models whose weights differ in format compares the formats too."""
    quantised = list(dict.fromkeys(spec.name for spec in models if spec.load_in_4bit))
    others = list(dict.fromkeys(spec.name for spec in models if not spec.load_in_4bit))
    if quantised and others:
        show(
            f"{', '.join(quantised)} in 4 bits, as trained, {', '.join(others)} not: "
            "--load-in-4bit quantises all, --no-load-in-4bit none"
        )
    elif quantised:
        show(f"4-bit weights: {', '.join(quantised)}")


def _identities(
    models: Sequence[ModelSpec],
    dtype: str = "auto",
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """What tells each model's record sets from others: digests of its weights, the device, their
    format, that they are quantised, if they are, and what the engine was told that matters.
    """
    identities = []
    for spec in models:
        if spec.adapter is not None:
            check_adapter_fits(spec.path, spec.adapter)
        device = "cuda" if has_gpu() else "cpu"
        quantised = {"weight_bits": 4} if spec.load_in_4bit else {}
        identity = model_identity(spec.path, spec.adapter) | {"device": device} | quantised
        if (found := dtype_of(spec, dtype)) is not None:
            identity["dtype"] = found
        if matters := not_free(arguments):
            identity["engine_arguments"] = matters
        identities.append(identity | asked_in(spec.prompt or PROJECT_PROMPT))
    return identities


def _with_templates(
    models: Sequence[ModelSpec], known: Mapping[int, str], show: Callable[[str], object]
) -> list[ModelSpec]:
    """The models with the chat template of each, and why; `known` has those of sets on disk."""
    found = []
    for number, spec in enumerate(models):
        wanted = known.get(number, spec.template)
        choice = template_for(spec.path, wanted, spec.adapter, spec.prompt)
        show(f"{spec.name}: {choice}")
        found.append(replace(spec, template=choice.template))
    return found


def _files(
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    out: Path,
    identities: Sequence[dict[str, Any]],
) -> dict[Key, Path]:
    """The record set of each model on each benchmark.

    NAME.jsonl, and NAME.DIGEST.jsonl where training seeds share a name; a set that exists under
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


def _report_golds(
    listed: Sequence[dict], benchmark: Benchmark, out: Path, show: Callable[[str], object]
) -> None:
    """Writes and counts the golds that an answer can hardly match."""
    if listed:
        file = out / f"golds-{file_name(benchmark.name)}.csv"
        write_table(file, listed)
        show(
            f"{benchmark.name}: {len(listed)} of {len(benchmark.rows)} golds are compared as text "
            f"or not as their benchmark's; {file} has them, and a repair table may mend them"
        )


def _report_overlap(
    training: Sequence[dict],
    benchmarks: Sequence[Benchmark],
    out: Path,
    show: Callable[[str], object],
) -> None:
    """Writes which problems share eight words in a row with the training set, and which are much
    like one of it.
    """
    rows, near = [], []
    for benchmark in benchmarks:
        found = overlap(training, benchmark)
        rows += [{"benchmark": benchmark.name} | row for row in found]
        whole = sum(row["shared"] == 1 for row in found)
        show(
            f"{benchmark.name}: {len(found)} of {len(benchmark.rows)} problems share eight words "
            f"in a row with the training set, {whole} are in it word for word"
        )
        alike = near_copies(training, benchmark)
        near += [{"benchmark": benchmark.name} | row for row in alike]
        show(
            f"{benchmark.name}: {len(alike)} of {len(benchmark.rows)} problems have the words and "
            "numbers of a training problem (near_copies.csv): paraphrases, or much alike"
        )
    write_table(out / "near_copies.csv", near)
    write_table(out / "overlap.csv", rows)


def _draw_sets(
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    out: Path,
    config: SamplingConfig,
    engine: str,
    loading: Mapping[str, Any],
    identities: Sequence[Mapping[str, Any]],
    files: Mapping[Key, Path],
    missing: Mapping[Key, int],
    show: Callable[[str], object],
) -> dict[Key, RecordSet]:
    """Every record set, complete; what a set lacks is drawn and graded."""
    from sage_unsloth.runs.progress import progress

    problems = sum(len(benchmark.rows) for benchmark in benchmarks)
    total, left = problems * config.num_samples * len(models), sum(missing.values())
    show(
        f"{len(models)} models x {problems} problems x {config.num_samples} samples = {total:,} "
        f"completions; {total - left:,} of them are in {out / 'samples'}"
    )
    sets: dict[Key, RecordSet] = {}
    bar = None
    try:
        engines = load_engines(engine, models, benchmarks, config, missing, **loading)
        for number, loaded in engines:
            spec = models[number]
            if bar is None:
                lacking = [b for b in benchmarks if missing[number, b.name]]
                if lacking:
                    with engine_errors(spec.name, "probe"):
                        first = before_first_report(missing, benchmarks, config)
                        show(estimate(loaded, lacking[0], config, left, first))
                bar = progress(total=total, initial=total - left, unit="completion")
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
                    prompt=spec.prompt or PROJECT_PROMPT,
                    bar=bar,
                )
                texts = {row["id"]: turns_of(row)[-1]["content"] for row in benchmark.rows}
                keep_texts(files[number, benchmark.name], texts)
                one = record_set(records, spec.name, benchmark.name, asdict(config))
                sets[number, benchmark.name] = replace(
                    one, texts=texts, provenance=benchmark.provenance
                )
            del loaded  # its memory is needed for the next one
    finally:
        if bar is not None:
            bar.close()
    return sets


def _count_missing(
    files: Mapping[Key, Path], benchmarks: Sequence[Benchmark], config: SamplingConfig
) -> dict[Key, int]:
    """Completions to draw for each set.

    A set is read twice, to count and to draw: the texts of all sets together may not fit.
    """
    rows = {benchmark.name: benchmark.rows for benchmark in benchmarks}
    missing = {}
    for key, file in files.items():
        wanted = {
            (row["id"], sample) for row in rows[key[1]] for sample in range(config.num_samples)
        }
        records = read_samples(file) if file.exists() else []
        done = {(record["problem_id"], record["sample"]) for record in records}
        missing[key] = len(wanted - done)
    return missing
