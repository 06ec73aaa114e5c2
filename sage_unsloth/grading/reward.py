"""TRL's reward function over a `Grader`."""

from collections import Counter
from collections.abc import Sequence

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader


class SolutionReward:
    """TRL's reward function: 1.0 for a correct answer, else 0.0; counts the grades for the log."""

    __name__ = "solution_reward"  # TRL names the metric after it
    required_columns = ("answer",)
    """Columns of the dataset that it reads; `guided_kl` refuses a dataset without them."""

    def __init__(self, grader: Grader):
        self.grader = grader
        self._counts: Counter[Grade] = Counter()
        self.last_batch: list[dict] = []  # prompt, completion, answer and grade of the last call

    def __call__(self, prompts=None, completions=(), answer=None, **_) -> list[float]:
        """One reward per completion, which is a text or a list of messages (the last one counts).

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
            {"prompt": _text(prompt), "completion": text, "answer": gold, "grade": grade.value}
            for prompt, text, gold, grade in zip(
                prompts or [None] * len(texts), texts, answer, grades, strict=True
            )
        ]
        return [float(grade is Grade.CORRECT) for grade in grades]

    def forget(self, dropped: Sequence[dict], batch: list[dict]) -> None:
        """Completions that are not trained on leave the counts; `batch` is what `last_batch` shall
        be.

        Args:
            dropped, batch: entries of earlier values of `last_batch`.
        """
        self._counts.subtract(Grade(row["grade"]) for row in dropped)
        self.last_batch = batch

    def pop_counts(self) -> dict[str, int]:
        """How many completions got each grade since the last call; every grade has a key."""
        counts, self._counts = self._counts, Counter()
        return {grade.value: counts[grade] for grade in Grade}


def _text(turns: str | list[dict] | None) -> str | None:
    """A text as it is; of a list of messages the last one's content."""
    if isinstance(turns, list):
        return turns[-1]["content"] if turns else ""
    return turns
