"""Record sets on disk as tables of counts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.grading.checker import Grade
from sage_unsloth.sampling.record_sets import read_samples, read_settings

BLOCKS = 5  # the paper's evaluation seeds; the samples of one run are split into as many


@dataclass(frozen=True, kw_only=True)
class RecordSet:
    """The graded samples of one model, of one training seed, on one benchmark.

    Attributes:
        model, benchmark: names.
        problems: ids, in the order of the rows of `correct`.
        correct: (P, N) bool.
        records: `num_tokens`, `finish_reason` and `grade` of all P * N.
        sampling: settings with which they were drawn.
    """

    model: str
    benchmark: str
    problems: tuple[str, ...]
    correct: np.ndarray
    records: list[dict]
    sampling: dict[str, Any]


def record_set(
    records: Sequence[dict], model: str, benchmark: str, sampling: dict[str, Any]
) -> RecordSet:
    """The records as a matrix.

    Raises:
        ValueError: there are none, or a problem lacks samples that another one has.
    """
    found: dict[str, dict[int, bool]] = defaultdict(dict)
    for record in records:
        found[record["problem_id"]][record["sample"]] = record["grade"] == Grade.CORRECT
    if not found:
        raise ValueError(
            f"{model} on {benchmark} must have samples; there are none; evaluate it first"
        )
    num_samples = max(max(samples) for samples in found.values()) + 1
    for problem, samples in found.items():
        if len(samples) != num_samples:
            raise ValueError(
                f"every problem must have {num_samples} samples; {problem!r} of {model} on "
                f"{benchmark} has {len(samples)}; "
                "run the same evaluate command again to draw the rest"
            )
    correct = np.array([[found[p][i] for i in range(num_samples)] for p in found])
    kept = ("num_tokens", "finish_reason", "grade")  # texts of all models together may not fit
    return RecordSet(
        model=model,
        benchmark=benchmark,
        problems=tuple(found),
        correct=correct,
        records=[{name: record[name] for name in kept} for record in records],
        sampling=sampling,
    )


def sets_below(folder: Path) -> list[Path]:
    """The record sets in a folder, and in the folders in it."""
    return sorted(f.with_suffix("").with_suffix(".jsonl") for f in folder.rglob("*.settings.json"))


def read_sets(files: Sequence[Path]) -> list[tuple[dict[str, Any], list[dict]]]:
    """Settings and records of each file, one named twice counted once.

    Raises:
        ValueError: sets that cannot be compared, or of another format.
    """
    sets, seen = [], Comparable()
    for file in dict.fromkeys(file.resolve() for file in files):
        settings, records = read_settings(file)["settings"], read_samples(file)
        seen.add(file, settings, records)
        sets.append((settings, records))
    return sets


class Comparable:
    """Refuses sets that only look as if they could be compared."""

    def __init__(self) -> None:
        self.golds: dict[tuple[str, str], tuple[str, Path]] = {}
        self.alike: dict[str, tuple[dict, Path]] = {}
        self.weights: dict[tuple, Path] = {}

    def add(self, file: Path, settings: dict[str, Any], records: Sequence[dict]) -> None:
        """Raises ValueError where the set was drawn or graded otherwise than those before it, or is
        one of them again.
        """
        benchmark = settings["benchmark"]
        # The sampling of all sets on a benchmark, its engine, and their grader.
        how = {
            "engine": settings["engine"],
            "sampling": settings["sampling"],
            "grader": sorted({record.get("grader", "none") for record in records}),
        }
        before, other = self.alike.setdefault(benchmark, (how, file))
        different = [name for name in how if how[name] != before[name]]
        if different:
            found = "; ".join(f"{name}: {before[name]} and {how[name]}" for name in different)
            raise ValueError(
                f"sets on {benchmark} must be drawn and graded alike to be compared; {other} and "
                f"{file} differ in {found}; "
                "another grader is mended by running evaluate on each again, which grades "
                "without drawing"
            )
        for record in records:
            gold, other = self.golds.setdefault(
                (benchmark, record["problem_id"]), (record["gold"], file)
            )
            if gold != record["gold"]:
                raise ValueError(
                    f"sets on {benchmark} must have the same problems to be compared; "
                    f"{record['problem_id']} has the answer "
                    f"{gold!r:.60} in {other} and {record['gold']!r:.60} in {file}; compare sets "
                    f"of one file of problems, or run "
                    "evaluate on each again after a gold was repaired"
                )
        if settings.get("weights") is not None:
            key = (benchmark, settings["model"], settings["weights"], settings.get("adapter"))
            if key in self.weights:
                raise ValueError(
                    f"training seeds of one model must have other weights; {self.weights[key]} "
                    f"and {file} are both of "
                    f"{settings['model']} with the same; leave one out"
                )
            self.weights[key] = file


def counts_of(
    benchmark: str, seeds: Sequence[RecordSet], by_model: dict[str, list[RecordSet]]
) -> tuple[int, np.ndarray]:
    """N and the correct counts (S, P), problems in the order of the benchmark's first set."""
    first = next(iter(by_model.values()))[0]
    rows = []
    for one in seeds:
        if set(one.problems) != set(first.problems):
            strange = sorted(set(one.problems) ^ set(first.problems))
            raise ValueError(
                f"sets on {benchmark} must have the same problems; those of {one.model} and "
                f"{first.model} differ in "
                f"{len(strange)}, {strange[0]!r} the first; evaluate both on all of them"
            )
        if one.correct.shape != seeds[0].correct.shape:
            raise ValueError(
                f"training seeds of {one.model} on {benchmark} must have as many samples each; got "
                f"{seeds[0].correct.shape[1]} and {one.correct.shape[1]}; draw the rest"
            )
        order = [one.problems.index(problem) for problem in first.problems]
        rows.append(one.correct[order].sum(axis=1))
    return seeds[0].correct.shape[1], np.stack(rows)
