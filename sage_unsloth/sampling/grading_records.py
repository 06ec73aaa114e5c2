"""Adds to records what a grader makes of their completions."""

from collections.abc import Mapping, Sequence

from sage_unsloth.grading.grader import Grader

GRADED = ("extracted", "gold", "grade", "kind", "grader")


def grade_records(records: Sequence[dict], golds: Sequence[str], grader: Grader) -> None:
    """Adds to each record the answer that was extracted, its gold, the grade, how it was reached
    (`grading.Kind`), and by which grader.
    """
    answers = [grader.extract(record["completion"]) for record in records]
    verdicts = grader.judge_answers(answers, golds)
    for record, answer, gold, verdict in zip(records, answers, golds, verdicts, strict=True):
        record |= {
            "extracted": answer,
            "gold": gold,
            "grade": verdict.grade.value,
            "kind": verdict.kind.value,
            "grader": grader.label,
        }


def is_stale(record: Mapping, grader: Grader, gold: str) -> bool:
    """Whether a record's grade is another grader's, or against another gold.

    A record of a batch that was drawn but not graded has no grader at all.
    """
    return record.get("grader") != grader.label or record["gold"] != gold


def regraded_line(record: Mapping) -> dict:
    """The line that replaces a record's grade in its file."""
    return {name: record[name] for name in ("problem_id", "sample", *GRADED)}
