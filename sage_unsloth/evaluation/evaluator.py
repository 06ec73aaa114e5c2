"""Evaluates models on benchmarks: samples and grades what is missing, and reports (`report`)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.complete_sets import (
    count_missing,
    draw_sets,
    identities_of,
    set_files,
)
from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.evaluation.record_tables import RecordSet
from sage_unsloth.evaluation.report import report_sets
from sage_unsloth.evaluation.trained_on import contamination_warnings
from sage_unsloth.figures import write_table
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.models.device import frees_models
from sage_unsloth.models.embedded import is_small, settle_process
from sage_unsloth.models.templates import choose_format
from sage_unsloth.models.tokenizers import open_tokenizer
from sage_unsloth.problems.benchmarks import Benchmark, check_golds, load_benchmark
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.overlap import overlap
from sage_unsloth.problems.published import PUBLISHED, TOGETHER
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.text import file_name
from sage_unsloth.sampling.engine_arguments import check_temperature
from sage_unsloth.sampling.engine_choice import choose_rollouts
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.sampling.record_files import (
    read_settings,
    refuse_other_set,
    set_settings,
    settings_path,
)
from sage_unsloth.trainers.backends import load_backend

logger = logging.getLogger(__name__)

KNOWN = (*PUBLISHED, *TOGETHER)


def check_columns_are_used(texts: Sequence[str], columns: Columns) -> None:
    """Raises ValueError for `--columns` and similar options without a custom file."""
    own = [text for text in texts if "=" in text and text.partition("=")[0] not in KNOWN]
    if columns and not own:
        raise ValueError(
            "--columns, --answer-pattern and --split are for your own problems (NAME=FILE), got "
            f"{' '.join(texts) or 'no benchmark'}, whose columns are known"
        )


def parse_benchmark(
    text: str,
    data: str | Path | None = None,
    problems: int | None = None,
    columns: Columns | None = None,
) -> Benchmark:
    """`NAME`, from the hub or the folder `data`, or `NAME=FILE`.

    Args:
        problems: number of problems to use; None uses all.

    Raises:
        ValueError: as `load_benchmark`; or `problems` < 1.
    """
    name, _, file = text.partition("=")
    benchmark = load_benchmark(name, file or data, columns=columns)
    if problems is None:
        return benchmark
    if problems < 1:
        raise ValueError(f"--problems must be >= 1, got {problems}")
    return replace(benchmark, rows=benchmark.rows[:problems])


def choose_engine(expected: str = "auto", *, load_in_4bit: bool = False) -> str:
    """vLLM if possible, else transformers with the reason logged; "vllm" insists.

    Raises:
        ValueError: an unknown engine, or vLLM where it cannot run or with 4-bit weights.
    """
    if load_in_4bit and expected == "vllm":
        raise ValueError(
            "4-bit weights need the engine transformers, got --engine vllm with --load-in-4bit or "
            "a model trained in 4 bits. Leave it out, or add --no-load-in-4bit"
        )
    return choose_rollouts("transformers" if load_in_4bit else expected)


@frees_models
def evaluate_models(
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    out: str | Path,
    config: SamplingConfig,
    *,
    against: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Samples and grades what is missing of every model on every benchmark, and reports.

    Args:
        against: the model that the others are compared with; None takes the first.
        options: as for `sample_models`.

    Raises:
        ValueError: bad input, found before any sampling.
        EngineError: the engine failed; run again to resume.
    """
    _check_request(models, benchmarks, against)
    sets = sample_models(models, benchmarks, out, config, **options)
    with exclusive_lock(out):
        return report_sets(sets, Path(out), against)


def sample_models(
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    out: str | Path,
    config: SamplingConfig,
    *,
    engine: str = "transformers",
    training: Sequence[dict] = (),
    dtype: str = "auto",
    engine_arguments: Mapping[str, Any] | None = None,
    show: Callable[[str], object] = logger.info,
) -> list[RecordSet]:
    """Samples and grades what is missing of every model on every benchmark; their record sets.

    Record sets are in `out/samples/BENCHMARK/MODEL.jsonl`; a second run samples only what is
    missing there.

    Args:
        models: specs of one name are training seeds of one method.
        engine: "transformers" or "vllm".
        training: rows with `problem`, to look for in the benchmarks.
        dtype: "auto" (each model's own), "float32", "bfloat16" or "float16"; recorded.
        engine_arguments: further arguments of vLLM's engine. Those that affect results distinguish
            its record sets; all are recorded with the set's settings.
        show: called with texts about the amount of work.

    Raises:
        ValueError: bad input, found before any sampling.
        EngineError: the engine failed; run again to resume.
    """
    out = Path(out)
    check_temperature(engine, config.temperature)
    _check_request(models, benchmarks, None)
    models = [
        replace(spec, prompt=choose_format(spec.path, spec.prompt, spec.adapter)) for spec in models
    ]
    if engine != "vllm" and engine_arguments:
        raise ValueError(
            f"engine arguments are for vLLM, got {', '.join(engine_arguments)} with engine {engine}"
        )
    _say_precisions(models, show)
    for warning in contamination_warnings(models, benchmarks):
        show(warning)
    identities = identities_of(models, dtype, engine_arguments or {})
    files = set_files(models, benchmarks, out, identities)
    templates = {}  # of the models that have a set already
    for (number, benchmark), file in files.items():
        if not (settings_path(file).exists() or file.exists()):
            continue
        recorded = read_settings(file)["settings"].get("template", "project")
        templates[number] = models[number].template or recorded
        identity = identities[number] | {"template": templates[number]}
        settings = set_settings(config, engine, models[number].name, benchmark, identity)
        refuse_other_set(file, settings)
    with exclusive_lock(out):
        out.mkdir(parents=True, exist_ok=True)
        for benchmark in benchmarks:
            with Grader(2, config.grade_seconds, boxed=True, checker=benchmark.checker) as grader:
                if benchmark.checker is not MATH:
                    grader.check_workers()
                _report_golds(check_golds(benchmark, grader), benchmark, out, show)
        if training:
            _report_overlap(training, benchmarks, out, show)
        missing = count_missing(files, benchmarks, config)
        if any(missing.values()):
            if engine == "transformers":
                load_backend()  # before transformers, whose tokenizers the templates are read from
            if all(is_small(spec.path) for spec in models):
                settle_process()
        models = _with_templates(models, templates, show)
        for identity, spec in zip(identities, models, strict=True):
            identity["template"] = spec.template
        loading = {"dtype": dtype, "arguments": engine_arguments}
        sets = draw_sets(
            models, benchmarks, out, config, engine, loading, identities, files, missing, show
        )
        return [sets[number, b.name] for b in benchmarks for number in range(len(models))]


def _check_request(
    models: Sequence[ModelSpec], benchmarks: Sequence[Benchmark], against: str | None
) -> None:
    names = [spec.name for spec in models]
    if against is not None and against not in names:
        known = ", ".join(dict.fromkeys(names))
        raise ValueError(f"--against must be one of {known}, got {against!r}")
    if not models or not benchmarks or len({b.name for b in benchmarks}) < len(benchmarks):
        raise ValueError(
            f"an evaluation needs models and different benchmarks, got {names} and "
            f"{[b.name for b in benchmarks]}"
        )
    if len(set(models)) < len(models):
        raise ValueError(
            f"models with the same name must differ, as training seeds do, got {names}"
        )


def _say_precisions(models: Sequence[ModelSpec], show: Callable[[str], object]) -> None:
    """Notes that models with different dtypes are compared, which compares the dtypes too."""
    quantised = list(dict.fromkeys(spec.name for spec in models if spec.load_in_4bit))
    others = list(dict.fromkeys(spec.name for spec in models if not spec.load_in_4bit))
    if quantised and others:
        show(
            f"{', '.join(quantised)} in 4 bits, as trained, {', '.join(others)} not: "
            "--load-in-4bit quantises all, --no-load-in-4bit none"
        )
    elif quantised:
        show(f"4-bit weights: {', '.join(quantised)}")


def _with_templates(
    models: Sequence[ModelSpec], known: Mapping[int, str], show: Callable[[str], object]
) -> list[ModelSpec]:
    """The models with their chat templates, with reasons; `known` has those of existing sets."""
    templates = []
    for number, spec in enumerate(models):
        expected = known.get(number, spec.template)
        choice = open_tokenizer(spec.path, expected, spec.adapter, spec.prompt)[1]
        show(f"{spec.name}: {choice}")
        templates.append(replace(spec, template=choice.template))
    return templates


def _report_golds(
    listed: Sequence[dict], benchmark: Benchmark, out: Path, show: Callable[[str], object]
) -> None:
    """Writes and counts the golds that an answer can hardly match."""
    if listed:
        file = out / f"golds-{file_name(benchmark.name)}.csv"
        write_table(file, listed)
        show(
            f"{benchmark.name}: {len(listed)} of {len(benchmark.rows)} golds are compared as text "
            f"or not as their benchmark's (listed in {file}). Correct a wrong one in a local copy"
        )


def _report_overlap(
    training: Sequence[dict],
    benchmarks: Sequence[Benchmark],
    out: Path,
    show: Callable[[str], object],
) -> None:
    """Writes which problems share eight consecutive words with the training set."""
    rows = []
    for benchmark in benchmarks:
        result = overlap(training, benchmark)
        rows += [{"benchmark": benchmark.name} | row for row in result]
        whole = sum(row["shared"] == 1 for row in result)
        show(
            f"{benchmark.name}: {len(result)} of {len(benchmark.rows)} problems share eight words "
            f"in a row with the training set, {whole} are in it word for word"
        )
    write_table(out / "overlap.csv", rows)
