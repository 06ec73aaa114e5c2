"""Golds that answers can be graded against; a row with any other teaches nothing."""

from collections.abc import Iterable, Sequence

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH, only_its_text


def gradable(rows: Sequence[dict], checker: Checker = MATH) -> list[bool]:
    """Whether each row's gold is one that answers can be graded against."""
    if checker is MATH:
        result = gradable_answers(row["answer"] for row in rows)
        return [row["answer"] in result for row in rows]
    return [_is_gold(row.get("gold", row["answer"]), checker) for row in rows]


def _is_gold(gold: str, checker: Checker) -> bool:
    try:
        checker.check_gold(gold)
    except ValueError:
        return False
    return True


def references_are_answers(rows: Sequence[dict], checker: Checker) -> bool:
    """Whether the references of a checker are what a model should write: some of these rows' are
    correct against themselves. Tests of a program, a pattern or a schema are not, even if one is.
    """
    if checker.gold_is_answer:
        return any(gradable(rows, checker))
    if not checker.name.partition(":")[2]:  # a checker of this package
        return False
    golds = [row.get("gold", row["answer"]) for row in rows]
    with Grader(checker=checker) as grader:
        return any(v.grade is Grade.CORRECT for v in grader.judge_answers(golds, golds))


def gradable_answers(answers: Iterable[str]) -> set[str]:
    """Those that mathematics finds correct against themselves, in more than one writing.

    Any other would never be rewarded, or hardly ever.
    """
    answers = [answer for answer in set(answers) if answer.strip()]
    with Grader() as grader:
        verdicts = grader.judge_answers(answers, answers)
    return {
        answer
        for answer, verdict in zip(answers, verdicts, strict=True)
        if verdict.grade is Grade.CORRECT and not only_its_text(answer, verdict)
    }
