"""Adds grades to records."""

from collections.abc import Mapping, Sequence

from sage_unsloth.grading.grader import Grader, strip_counted_noun

GRADED = ("extracted", "gold", "grade", "kind", "grader")


def grade_records(
    records: Sequence[dict],
    golds: Sequence[str],
    grader: Grader,
    problems: Sequence[str | None] | None = None,
) -> None:
    """Adds to each record the extracted answer, gold, grade, `grading.Kind` and grader.

    With the problems' texts, an answer may end in what its problem counts; that end is stored as
    `counted`, so that the record can be graded again without its problem.
    """
    answers = [grader.extract(record["completion"]) for record in records]
    if problems is None:
        counted = [record.get("counted", "") for record in records]
    else:
        counted = grader.counted_nouns(answers, golds, problems)
    verdicts = grader.judge_answers(list(map(strip_counted_noun, answers, counted)), golds)
    for record, answer, gold, end, verdict in zip(
        records, answers, golds, counted, verdicts, strict=True
    ):
        if end:
            record["counted"] = end
        record |= {
            "extracted": answer,
            "gold": gold,
            "grade": verdict.grade.value,
            "kind": verdict.kind.value,
            "grader": grader.label,
        }


def is_stale(record: Mapping, grader: Grader, gold: str) -> bool:
    """Whether a record has no grade, or one of another grader or against another gold."""
    return record.get("grader") != grader.label or record["gold"] != gold


def regraded_line(record: Mapping) -> dict:
    """The line that replaces a record's grade in its file."""
    fields = ("problem_id", "sample", *GRADED, "counted")
    return {name: record[name] for name in fields if name in record}
