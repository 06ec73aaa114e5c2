"""The record sets of an evaluation: identities, files, missing samples, and sampling them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sage_unsloth.evaluation.loading import ModelSpec, load_engines, spec_dtype
from sage_unsloth.evaluation.record_tables import RecordSet, keep_texts, record_set
from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.weights import check_adapter_fits, model_identity
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.prompts import PROJECT_PROMPT, row_messages
from sage_unsloth.runs.text import file_name
from sage_unsloth.sampling.engine_arguments import not_free
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.sampling.record_files import read_samples, read_settings, settings_path
from sage_unsloth.sampling.record_sets import prompt_identity, sample_and_grade

Key = tuple[int, str]
"""Number of the model, since training seeds share a name, and name of the benchmark."""


def model_identities(
    models: Sequence[ModelSpec],
    dtype: str = "auto",
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """What distinguishes each model's record sets: digests of its weights, device, dtype,
    quantisation, and engine arguments that affect results.
    """
    identities = []
    for spec in models:
        if spec.adapter is not None:
            check_adapter_fits(spec.path, spec.adapter)
        device = "cuda" if has_gpu() else "cpu"
        quantised = {"weight_bits": 4} if spec.load_in_4bit else {}
        identity = model_identity(spec.path, spec.adapter) | {"device": device} | quantised
        if (result := spec_dtype(spec, dtype)) is not None:
            identity["dtype"] = result
        if matters := not_free(arguments):
            identity["engine_arguments"] = matters
        identities.append(identity | prompt_identity(spec.prompt or PROJECT_PROMPT))
    return identities


def set_files(
    models: Sequence[ModelSpec],
    benchmarks: Sequence[Benchmark],
    out: Path,
    identities: Sequence[dict[str, Any]],
) -> dict[Key, Path]:
    """The record set of each model on each benchmark.

    NAME.jsonl, or NAME.DIGEST.jsonl if training seeds share a name; an existing set keeps its file.
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


def count_missing(
    files: Mapping[Key, Path], benchmarks: Sequence[Benchmark], config: SamplingConfig
) -> dict[Key, int]:
    """Completions that are missing in each set.

    A set is read twice, to count and to sample: the texts of all sets may not fit in memory.
    """
    rows = {benchmark.name: benchmark.rows for benchmark in benchmarks}
    missing = {}
    for key, file in files.items():
        expected = {
            (row["id"], sample) for row in rows[key[1]] for sample in range(config.num_samples)
        }
        records = read_samples(file) if file.exists() else []
        done = {(record["problem_id"], record["sample"]) for record in records}
        missing[key] = len(expected - done)
    return missing


def draw_sets(
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
    """Completes every record set: samples and grades what is missing."""
    from sage_unsloth.runs.progress import progress

    problems = sum(len(benchmark.rows) for benchmark in benchmarks)
    total, left = problems * config.num_samples * len(models), sum(missing.values())
    show(
        f"{len(models)} models x {problems} problems x {config.num_samples} samples = {total:,} "
        f"completions, {total - left:,} of them are in {out / 'samples'}"
    )
    sets: dict[Key, RecordSet] = {}
    bar = None
    try:
        engines = load_engines(engine, models, benchmarks, config, missing, **loading)
        for number, loaded in engines:
            spec = models[number]
            if bar is None:
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
                texts = {row["id"]: row_messages(row)[-1]["content"] for row in benchmark.rows}
                keep_texts(files[number, benchmark.name], texts)
                item = record_set(records, spec.name, benchmark.name, asdict(config))
                sets[number, benchmark.name] = replace(
                    item, texts=texts, provenance=benchmark.provenance
                )
            del loaded  # its memory is needed for the next one
    finally:
        if bar is not None:
            bar.close()
    return sets
