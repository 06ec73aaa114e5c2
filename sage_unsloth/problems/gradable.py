"""Whether answers can be graded against a gold; other rows teach nothing."""

from collections.abc import Iterable, Sequence

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH, only_its_text


def gradable(rows: Sequence[dict], checker: Checker = MATH) -> list[bool]:
    """For each row, whether answers can be graded against its gold."""
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
    """Whether the golds of a checker are what a model should write.

    That is, some of these rows' golds are correct against themselves. Tests of a program, a pattern
    or a schema never are.
    """
    if checker.gold_is_answer:
        return any(gradable(rows, checker))
    if not checker.name.partition(":")[2]:  # a checker of this package
        return False
    golds = [row.get("gold", row["answer"]) for row in rows]
    with Grader(checker=checker) as grader:
        return any(v.grade is Grade.CORRECT for v in grader.judge_answers(golds, golds))


def gradable_answers(answers: Iterable[str]) -> set[str]:
    """Answers that mathematics grades as correct against themselves, in more than one spelling.

    Others would hardly ever be rewarded.
    """
    answers = [answer for answer in set(answers) if answer.strip()]
    with Grader() as grader:
        verdicts = grader.judge_answers(answers, answers)
    return {
        answer
        for answer, verdict in zip(answers, verdicts, strict=True)
        if verdict.grade is Grade.CORRECT and not only_its_text(answer, verdict)
    }
