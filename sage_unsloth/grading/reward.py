"""The verifiable reward: 1 for a correct answer, 0 for any other, as TRL calls it."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader

Turns = str | list[dict]


class SolutionReward:
    """TRL's reward function: 1.0 for a correct answer, else 0.0; counts the grades for the log.

    Attributes:
        required_columns: of the data set, which the function reads; `guided_kl` refuses a data set
            without them.
        grader: grades the completions.
        last_batch: `prompt`, `completion`, `answer` and `grade` of each completion of the last
            call.
    """

    __name__ = "solution_reward"  # TRL names the metric after it
    required_columns: ClassVar[tuple[str, ...]] = ("answer",)

    def __init__(self, grader: Grader):
        self.grader = grader
        self.last_batch: list[dict] = []
        self._counts: Counter[Grade] = Counter()

    def __call__(
        self,
        prompts: Sequence[Turns | None] | None = None,
        completions: Sequence[Turns] = (),
        answer: Sequence[str] | None = None,
        **_: object,
    ) -> list[float]:
        """One reward for each completion.

        Args:
            prompts, completions: texts, or lists of messages, of which the last one counts.
            answer: the gold answers, the data set's column of that name.
            **_: the other columns and `completion_ids`, which TRL passes as well.

        Raises:
            ValueError: no `answer` column was passed; and see `Grader.grade_many`.
        """
        if answer is None:
            raise ValueError(
                "solution_reward needs the gold answers; the data set has no column `answer`; "
                "rename the column that holds them"
            )
        texts = [_text(completion) for completion in completions]
        grades = self.grader.grade_many(texts, answer)
        self._counts.update(grades)
        self.last_batch = [
            {
                "prompt": None if prompt is None else _text(prompt),
                "completion": text,
                "answer": gold,
                "grade": grade.value,
            }
            for prompt, text, gold, grade in zip(
                prompts or [None] * len(texts), texts, answer, grades, strict=True
            )
        ]
        return [float(grade is Grade.CORRECT) for grade in grades]

    def forget(self, dropped: Sequence[dict], batch: list[dict]) -> None:
        """Takes completions that are not trained on out of the counts.

        Args:
            dropped: these completions, as they were in `last_batch`.
            batch: becomes `last_batch`.
        """
        self._counts.subtract(Grade(row["grade"]) for row in dropped)
        self.last_batch = batch

    def pop_counts(self) -> dict[str, int]:
        """How many completions got each grade since the last call; every grade has a key."""
        counts, self._counts = self._counts, Counter()
        return {grade.value: counts[grade] for grade in Grade}


def _text(turns: Turns) -> str:
    """A text as it is; of a list of messages the last one's content."""
    if isinstance(turns, list):
        return turns[-1]["content"] if turns else ""
    return turns
