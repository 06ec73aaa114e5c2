"""Record sets as tables of counts, and whether they can be compared."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.grading.checker import Grade
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.sampling.counts import correct_matrix
from sage_unsloth.sampling.record_files import read_set, read_settings

TEXTS = "problems.json"  # beside the record sets of a benchmark
EXAMPLE = 4_000  # characters that are kept of a completion to be read


@dataclass(frozen=True, kw_only=True)
class RecordSet:
    """The graded samples of one model, of one training seed, on one benchmark.

    Attributes:
        problems: ids, in the order of the rows of `correct`.
        correct: (P, N) bool.
        records: `num_tokens`, `finish_reason` and `grade` of all P * N.
        golds: problem -> gold, in the order of `problems`.
        grader: of the records; the first of several.
        examples: problem -> its first correct and its first wrong record, cut to `EXAMPLE`
            characters.
        texts: problem -> its text, if known.
        provenance: origin of the problems, as in `Benchmark`.
    """

    model: str
    benchmark: str
    problems: tuple[str, ...]
    correct: np.ndarray
    records: list[dict]
    sampling: dict[str, Any]
    golds: Mapping[str, str] = field(default_factory=dict)
    grader: str = ""
    examples: Mapping[str, Mapping[str, dict]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    provenance: Sequence[Mapping[str, Any]] = ()


def record_set(
    records: Sequence[dict], model: str, benchmark: str, sampling: dict[str, Any]
) -> RecordSet:
    """The records as a matrix; ValueError for none, or for a problem with missing samples."""
    if not records:
        raise ValueError(
            f"{model} on {benchmark} must have samples, but there are none. Evaluate it first"
        )
    refuse_ungraded(records, model, benchmark)
    problems = tuple(dict.fromkeys(record["problem_id"] for record in records))
    selected = ("num_tokens", "finish_reason", "grade")  # texts of all models together may not fit
    return RecordSet(
        model=model,
        benchmark=benchmark,
        problems=problems,
        correct=correct_matrix(records, problems, of=f"{model} on {benchmark}"),
        records=[{name: record[name] for name in selected} for record in records],
        sampling=sampling,
        golds={record["problem_id"]: record.get("gold", "") for record in records},
        grader=records[0].get("grader", ""),
        examples=_examples(records),
    )


def refuse_ungraded(records: Sequence[dict], model: str, benchmark: str) -> None:
    """Raises ValueError for completions whose grading failed or was not finished."""
    if ungraded := sum("grade" not in record for record in records):
        raise ValueError(
            f"every completion must be graded, but {ungraded} of {model} on {benchmark} are not. "
            "Run evaluate again, which grades them"
        )


def _examples(records: Sequence[dict]) -> dict[str, dict[str, dict]]:
    """problem -> "correct" and "wrong" -> the first record of that kind."""
    result: dict[str, dict[str, dict]] = defaultdict(dict)
    for record in sorted(records, key=lambda record: record["sample"]):
        kind = "correct" if record["grade"] == Grade.CORRECT else "wrong"
        text = record.get("completion")
        if text is not None and kind not in result[record["problem_id"]]:
            result[record["problem_id"]][kind] = {
                "sample": record["sample"],
                "completion": text[:EXAMPLE],
                "left_out": max(0, len(text) - EXAMPLE),
            }
    return dict(result)


def keep_texts(file: Path, texts: Mapping[str, str]) -> None:
    """Writes the problems' texts next to a record set; existing ones stay."""
    path = file.parent / TEXTS
    before = read_json(path) if path.is_file() else {}
    if not texts.items() <= before.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, before | dict(texts))


def read_texts(file: Path) -> dict[str, str]:
    """problem -> text, as written by `keep_texts`; may be empty."""
    path = file.parent / TEXTS
    return read_json(path) if path.is_file() else {}


def sets_below(folder: Path) -> list[Path]:
    """The record sets in a folder, recursively.

    In the order of an evaluation's report if the folder has one, else by name.
    """
    names = sorted(folder.rglob("*.settings.json"))
    files = [file.with_suffix("").with_suffix(".jsonl") for file in names]
    report = folder / "report.json"
    if not report.is_file():
        return files
    table = read_json(report).get("table", [])  # other reports have none
    places = {(row["benchmark"], row["model"]): place for place, row in enumerate(table)}

    def place(file: Path) -> int:
        settings = read_settings(file)["settings"]
        return places.get((settings["benchmark"], settings["model"]), len(places))

    return sorted(files, key=place)


def read_sets(files: Sequence[Path]) -> list[tuple[dict[str, Any], list[dict]]]:
    """Settings and records of each file; a repeated file counts once.

    Raises:
        ValueError: sets that cannot be compared, or of another format.
    """
    sets, seen = [], Comparable()
    for file in dict.fromkeys(file.resolve() for file in files):
        settings, records = read_set(file)
        seen.add(file, settings, records)
        sets.append((settings, records))
    return sets


class Comparable:
    """Raises for sets that cannot be compared."""

    def __init__(self) -> None:
        self.golds: dict[tuple[str, str], tuple[str, Path]] = {}
        self.alike: dict[str, tuple[dict, list[str], Path]] = {}
        self.weights: dict[tuple, Path] = {}

    def add(self, file: Path, settings: dict[str, Any], records: Sequence[dict]) -> None:
        """Compares a set with those before it.

        Raises:
            ValueError: other settings of sampling or grading, other golds, or a set that was added
                already.
        """
        self._check_sampling(file, settings, records)
        self._check_golds(file, settings["benchmark"], records)
        if settings.get("weights") is not None:
            self._check_weights(file, settings)

    def _check_sampling(
        self, file: Path, settings: dict[str, Any], records: Sequence[dict]
    ) -> None:
        benchmark = settings["benchmark"]
        how = {
            "engine": settings["engine"],
            "sampling": settings["sampling"],
            "weight_bits": settings.get("weight_bits", 16),
        }
        # Completions that are not graded yet are refused, or left out of a partial report.
        graders = sorted({record["grader"] for record in records if "grader" in record})
        before, graders_before, other = self.alike.setdefault(benchmark, (how, graders, file))
        different = [name for name in how if how[name] != before[name]]
        if different:
            result = ", ".join(f"{name}: {before[name]} and {how[name]}" for name in different)
            raise ValueError(
                f"sets on {benchmark} must be sampled alike to be compared, but {other} and {file} "
                f"differ in {result}. Sample one of them again, in another folder"
            )
        both = list(dict.fromkeys([*graders_before, *graders]))
        if len(both) > 1:
            files = [str(item) for item in dict.fromkeys((other, file))]
            raise ValueError(
                f"sets on {benchmark} must be graded alike to be compared, but the lines of "
                f"{' and '.join(files)} were graded by {' and by '.join(both)}. Run evaluate on "
                "each again: it grades old records and samples nothing"
            )

    def _check_golds(self, file: Path, benchmark: str, records: Sequence[dict]) -> None:
        for record in records:
            problem, result = record["problem_id"], record["gold"]
            gold, other = self.golds.setdefault((benchmark, problem), (result, file))
            if gold != result:
                raise ValueError(
                    f"sets on {benchmark} must have the same problems to be compared, but "
                    f"{problem} has the answer {gold!r:.60} in {other} and {result!r:.60} in "
                    f"{file}. Use the same file of problems, and run evaluate again after "
                    "repairing a gold"
                )

    def _check_weights(self, file: Path, settings: dict[str, Any]) -> None:
        names = ("benchmark", "model", "weights")
        key = (*(settings[name] for name in names), settings.get("adapter"))
        if key in self.weights:
            raise ValueError(
                f"training seeds must have different weights, but {self.weights[key]} and {file} "
                f"are both of {settings['model']} with the same"
            )
        self.weights[key] = file


def seed_counts(
    benchmark: str, seeds: Sequence[RecordSet], first: RecordSet
) -> tuple[int, np.ndarray]:
    """N, and the correct samples of each training seed of one model, (S, P).

    Args:
        first: the benchmark's first set, which decides the order of problems.

    Raises:
        ValueError: other problems than those of `first`, or seeds with different numbers of
            samples.
    """
    rows = []
    for seed in seeds:
        if set(seed.problems) != set(first.problems):
            strange = sorted(set(seed.problems) ^ set(first.problems))
            raise ValueError(
                f"sets on {benchmark} must have the same problems, but those of {seed.model} and "
                f"{first.model} differ in {len(strange)}, {strange[0]!r} the first. Evaluate both "
                "on all of them"
            )
        if seed.correct.shape != seeds[0].correct.shape:
            raise ValueError(
                f"training seeds of {seed.model} on {benchmark} must have as many samples each, "
                f"got {seeds[0].correct.shape[1]} and {seed.correct.shape[1]}"
            )
        rows.append(in_order(seed, first.problems).sum(axis=1))
    return seeds[0].correct.shape[1], np.stack(rows)


def in_order(item: RecordSet, problems: Sequence[str]) -> np.ndarray:
    """`correct` of a set, (P, N), with rows in the order of `problems`."""
    return item.correct[[item.problems.index(problem) for problem in problems]]
