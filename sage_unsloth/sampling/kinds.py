"""How answers reached their grade, from what records and rollouts keep of each.

A reward that is gamed shows here first: the answers of one kind become many, and are right.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sage_unsloth.grading.checker import Grade

UNKNOWN = "not recorded"  # of a line that was graded before kinds were kept


def kind_of(record: Mapping[str, Any]) -> str:
    """The kind of one record's comparison (`grading.Kind`), or `UNKNOWN`."""
    return record.get("kind", UNKNOWN)


def count_kinds(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """kind -> how many `answers` were compared so, and how many of them are `correct`.

    Args:
        records: with `grade` and `kind`.
    """
    counts: dict[str, dict[str, int]] = {}
    for record in records:
        found = counts.setdefault(kind_of(record), {"answers": 0, "correct": 0})
        found["answers"] += 1
        found["correct"] += record["grade"] == Grade.CORRECT
    return dict(sorted(counts.items(), key=lambda item: -item[1]["answers"]))


def correct_shares(counts: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """kind -> its share of the correct answers; of kinds that have some."""
    total = sum(found["correct"] for found in counts.values())
    return {
        kind: found["correct"] / total for kind, found in counts.items() if found["correct"] > 0
    }


def kinds_text(counts: Mapping[str, Mapping[str, int]]) -> str:
    """One line: "number 12 of 20 right, text 3 of 4 right"."""
    return ", ".join(
        f"{kind} {found['correct']} of {found['answers']} right" for kind, found in counts.items()
    )
