"""The verifiable reward: 1 for a correct answer, 0 for any other, as TRL calls it."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.grading.grader import Grader, without_counted

TextOrTurns = str | list[dict]


class SolutionReward:
    """TRL's reward function: 1.0 for a correct answer, else 0.0; counts the grades for the log.

    Attributes:
        required_columns: columns that the data set must have, checked by `guided_kl`.
        last_batch: for each completion of the last call, its `prompt`, `completion`, `answer`,
            `extracted`, `grade`, `kind` and `grader`.
    """

    __name__ = "solution_reward"  # TRL names the metric after it
    required_columns: ClassVar[tuple[str, ...]] = ("answer",)

    def __init__(self, grader: Grader):
        self.grader = grader
        self.last_batch: list[dict] = []
        self._counts: Counter[Grade] = Counter()
        self._kinds: Counter[Kind] = Counter()  # of correct answers

    def __call__(
        self,
        prompts: Sequence[TextOrTurns | None] | None = None,
        completions: Sequence[TextOrTurns] = (),
        answer: Sequence[str] | None = None,
        **_: object,
    ) -> list[float]:
        """One reward for each completion.

        Args:
            prompts, completions: texts, or lists of messages, of which the last one counts.
            answer: the gold answers, the data set's column of that name.
            **_: the other columns and `completion_ids`, which TRL passes as well.

        Raises:
            ValueError: no `answer` column, or as in `Grader.grade_many`.
        """
        if answer is None:
            raise ValueError(
                "solution_reward needs the gold answers, but the data set has no column `answer`"
            )
        texts = [_text(completion) for completion in completions]
        extracted = [self.grader.extract(text) for text in texts]
        requested = [
            None if prompt is None else _text(prompt) for prompt in prompts or [None] * len(texts)
        ]
        counted = self.grader.counted(extracted, answer, requested)
        verdicts = self.grader.judge_answers(list(map(without_counted, extracted, counted)), answer)
        self._counts.update(verdict.grade for verdict in verdicts)
        self._kinds.update(v.kind for v in verdicts if v.grade is Grade.CORRECT)
        self.last_batch = [
            {
                "prompt": prompt,
                "completion": text,
                "answer": gold,
                "extracted": result,
                "grade": verdict.grade.value,
                "kind": verdict.kind.value,
                "grader": self.grader.label,
            }
            for prompt, text, gold, result, verdict in zip(
                requested, texts, answer, extracted, verdicts, strict=True
            )
        ]
        return [float(verdict.grade is Grade.CORRECT) for verdict in verdicts]

    def forget(self, dropped: Sequence[dict], batch: list[dict]) -> None:
        """Removes completions that are not trained on from the counts.

        Args:
            dropped: their rows of `last_batch`.
            batch: becomes `last_batch`.
        """
        self._counts.subtract(Grade(row["grade"]) for row in dropped)
        self._kinds.subtract(Kind(row["kind"]) for row in dropped if row["grade"] == Grade.CORRECT)
        self.last_batch = batch

    def pop_counts(self) -> dict[str, int]:
        """Number of completions by grade since the last call; every grade has a key."""
        counts, self._counts = self._counts, Counter()
        return {grade.value: counts[grade] for grade in Grade}

    def pop_kinds(self) -> dict[str, int]:
        """Number of correct completions by kind since the last call, without zeros."""
        kinds, self._kinds = self._kinds, Counter()
        return {kind.value: count for kind, count in kinds.items() if count}


def _text(turns: TextOrTurns) -> str:
    """A text as it is; of a list of messages the last content."""
    if isinstance(turns, list):
        return turns[-1]["content"] if turns else ""
    return turns
