"""Counts how answers were compared, from records and rollouts.

Reward hacking shows here first: answers of one kind become frequent, and correct.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sage_unsloth.grading.checker import Grade

UNKNOWN = "not recorded"  # of a line that was graded before kinds were kept


def record_kind(record: Mapping[str, Any]) -> str:
    """A record's `grading.Kind`, or `UNKNOWN`."""
    return record.get("kind", UNKNOWN)


def count_kinds(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """kind -> number of `answers` compared in that way, and of `correct` ones.

    Args:
        records: with `grade` and `kind`.
    """
    counts: dict[str, dict[str, int]] = {}
    for record in records:
        result = counts.setdefault(record_kind(record), {"answers": 0, "correct": 0})
        result["answers"] += 1
        result["correct"] += record["grade"] == Grade.CORRECT
    return dict(sorted(counts.items(), key=lambda item: -item[1]["answers"]))


def correct_shares(counts: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """kind -> its share of the correct answers, if it has any."""
    total = sum(result["correct"] for result in counts.values())
    return {
        kind: result["correct"] / total for kind, result in counts.items() if result["correct"] > 0
    }


def kinds_text(counts: Mapping[str, Mapping[str, int]]) -> str:
    """One line: "number 12 of 20 correct, text 3 of 4 correct"."""
    return ", ".join(
        f"{kind} {result['correct']} of {result['answers']} correct"
        for kind, result in counts.items()
    )
