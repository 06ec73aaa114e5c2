"""Adds to records what a grader makes of their completions."""

from collections.abc import Mapping, Sequence

from sage_unsloth.grading.grader import Grader, without_counted

GRADED = ("extracted", "gold", "grade", "kind", "grader")


def grade_records(
    records: Sequence[dict],
    golds: Sequence[str],
    grader: Grader,
    problems: Sequence[str | None] | None = None,
) -> None:
    """Adds to each record the answer that was extracted, its gold, the grade, how it was reached
    (`grading.Kind`), and by which grader.

    With the texts of the problems, an answer may end in what its problem counts; such an end is
    kept as `counted`, so that the record can be graded again without its problem.
    """
    answers = [grader.extract(record["completion"]) for record in records]
    if problems is None:
        counted = [record.get("counted", "") for record in records]
    else:
        counted = grader.counted(answers, golds, problems)
    verdicts = grader.judge_answers(list(map(without_counted, answers, counted)), golds)
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
    """Whether a record's grade is another grader's, or against another gold.

    A record of a batch that was drawn but not graded has no grader at all.
    """
    return record.get("grader") != grader.label or record["gold"] != gold


def regraded_line(record: Mapping) -> dict:
    """The line that replaces a record's grade in its file."""
    fields = ("problem_id", "sample", *GRADED, "counted")
    return {name: record[name] for name in fields if name in record}
