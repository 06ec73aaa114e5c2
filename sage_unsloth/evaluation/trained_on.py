"""Finds benchmarks that a model was trained on, from the records of its run."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.runs.files import read_json


def contamination_warnings(
    models: Sequence[ModelSpec], benchmarks: Sequence[Benchmark]
) -> Iterator[str]:
    """A warning for each model and benchmark with the same file digest.

    Models without a run, or whose run recorded no data, give none.
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
    """The data recorded in a model's run; {} without a record."""
    record = Path(spec.adapter or spec.path).parent / "run.json"
    return read_json(record).get("data", {}) if record.is_file() else {}
