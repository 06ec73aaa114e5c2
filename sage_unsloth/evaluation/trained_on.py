"""Benchmarks that a model was trained on, by what its run recorded of its data."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.runs.files import read_json


def contamination_warnings(
    models: Sequence[ModelSpec], benchmarks: Sequence[Benchmark]
) -> Iterator[str]:
    """A warning for each model and benchmark of one file, by its digest.

    Args:
        models: of runs or not; those of other origin, and of runs that recorded no data, are
            silent.
        benchmarks: what they are asked.
    """
    for spec in models:
        data = _data_of(spec)
        for benchmark in benchmarks:
            for part in benchmark.provenance:
                if "sha256" in part and part["sha256"] == data.get("sha256"):
                    yield (
                        f"{spec.name} was trained on {part['file']}, which is {benchmark.name}: "
                        "its pass@k there says nothing of other problems. Use problems that were "
                        "kept out of training"
                    )


def _data_of(spec: ModelSpec) -> dict[str, Any]:
    """What the run of a model recorded of its data; {} where there is no such record."""
    record = Path(spec.adapter or spec.path).parent / "run.json"
    return read_json(record).get("data", {}) if record.is_file() else {}
