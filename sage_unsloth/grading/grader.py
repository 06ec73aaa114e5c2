"""Grades the answer inside a completion's solution tag.

Answers that need no evaluation (numbers, units, words) are compared in this process, at a cost
bounded by their length (`tokens`). Others go to a worker process that is killed when its time is
over (`workers`).
"""

import os
import threading
from collections.abc import Sequence

from sage_unsloth.grading import extraction
from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.extraction import extract_answer, last_block
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.workers import CUT_SHORT, LATE, Workers
from sage_unsloth.prompts import PROJECT_PROMPT, SOLUTION_END, SOLUTION_START, PromptFormat

CACHED_PAIRS, CACHED_LENGTH = 16_384, 200  # characters of an answer
# For answers that a batch had no time for. Compared by identity: these are not cached.
_CUT_SHORT = Verdict(Grade.TIMED_OUT, Kind.NONE)

AnswerAndGold = tuple[str | None, str]  # extracted answer, gold


def grading_workers() -> int:
    """Worker processes that suit this machine; an answer that hangs blocks one."""
    return min(4, os.cpu_count() or 1)


class Grader:
    """Grades completions. Use it as a context manager, which stops its workers; thread-safe.

    Args:
        workers: number of processes; they start with the first answer that needs one.
        time_limit: seconds for one answer in a worker; after that the worker is killed and
            replaced.
        memory_limit_gib: address space of one worker, which itself needs about .1 GiB.
        boxed: extract answers by the rules of evaluation (`extraction`), not of training.
        checker: the verifier, which decides whether an answer is correct.
        prompt: defines the tags of an answer.
    """

    def __init__(
        self,
        workers: int = 1,
        time_limit: float = 5.0,
        memory_limit_gib: float = 1.0,
        boxed: bool = False,
        checker: Checker = MATH,
        prompt: PromptFormat = PROJECT_PROMPT,
    ):
        self.boxed, self.checker, self.prompt = boxed, checker, prompt
        limits = (workers, time_limit, memory_limit_gib)
        if checker.workers is not None:
            self._workers = checker.workers(*limits)
        else:
            self._workers = Workers(checker.compare, *limits, checker.typical)
        self._cache: dict[AnswerAndGold, Verdict] = {}  # least recently used first
        self._lock = threading.Lock()

    def grade_many(self, completions: Sequence[str], answers: Sequence[str]) -> list[Grade]:
        """One grade per completion, in order; equal pairs of answer and gold are graded once.

        Raises:
            ValueError: lengths differ, or a gold is None, empty or cannot be parsed.
            RuntimeError: a worker cannot start, or its code is broken.
        """
        return self.grade_answers([self.extract(text) for text in completions], answers)

    @property
    def label(self) -> str:
        """Checker, versions and rules of extraction, as recorded."""
        stage = "evaluation" if self.boxed else "training"
        return f"{self.checker.label}, {stage} extraction {extraction.VERSION}"

    def extract(self, completion: str) -> str | None:
        """The answer that is graded, or None."""
        result = extract_answer(completion, boxed=self.boxed, prompt=self.prompt)
        if result is None and self.checker.blocks:
            return last_block(completion, self.prompt)
        return result

    def counted(
        self,
        extracted: Sequence[str | None],
        answers: Sequence[str],
        problems: Sequence[str | None],
    ) -> list[str]:
        """The end of each answer that only names what its problem counts, or ""; see `Checker`."""
        rule = self.checker.counted
        return [
            "" if rule is None or answer is None or not problem else rule(answer, gold, problem)
            for answer, gold, problem in zip(extracted, answers, problems, strict=True)
        ]

    def grade_answers(self, extracted: Sequence[str | None], answers: Sequence[str]) -> list[Grade]:
        """`grade_many` for extracted answers."""
        return [verdict.grade for verdict in self.judge_answers(extracted, answers)]

    def judge_answers(
        self, extracted: Sequence[str | None], answers: Sequence[str]
    ) -> list[Verdict]:
        """`grade_answers` with the kind of each comparison."""
        pairs = list(zip(extracted, answers, strict=True))
        verdicts: dict[AnswerAndGold, Verdict] = {}
        hard: dict[AnswerAndGold, tuple[str, str]] = {}
        with self._lock:
            for pair in dict.fromkeys(pairs):
                # Popped here and put back by `_remember`, so the order is that of last use.
                result = self._cache.pop(pair, None) or self.checker.plainly(*pair)
                if isinstance(result, Verdict):
                    verdicts[pair] = result
                else:
                    hard[pair] = result
            if hard:
                # Different answers may have one normal form.
                compared = self._compare_all(list(dict.fromkeys(hard.values())))
                verdicts.update((pair, compared[texts]) for pair, texts in hard.items())
            self._remember(pairs, verdicts)
        return [verdicts[pair] for pair in pairs]

    def _remember(
        self, pairs: Sequence[AnswerAndGold], verdicts: dict[AnswerAndGold, Verdict]
    ) -> None:
        for pair in dict.fromkeys(pairs):
            # Long answers rarely repeat, and caching them would fill the memory.
            if len(pair[0] or "") <= CACHED_LENGTH and verdicts[pair] is not _CUT_SHORT:
                self._cache[pair] = verdicts[pair]
        while len(self._cache) > CACHED_PAIRS:
            del self._cache[next(iter(self._cache))]

    def _compare_all(self, questions: list[tuple[str, str]]) -> dict[tuple[str, str], Verdict]:
        verdicts = {}
        for question, value in zip(questions, self._workers.ask(questions), strict=True):
            if value is None:
                raise ValueError(f"a gold answer must parse, got {question[1]!r}")
            if value is CUT_SHORT:
                verdicts[question] = _CUT_SHORT
            elif value is LATE:
                verdicts[question] = Verdict(Grade.TIMED_OUT, Kind.NONE)
            else:
                verdicts[question] = Verdict(Grade(value[0]), Kind(value[1]))
        return verdicts

    @property
    def kept_from(self) -> tuple[str, ...]:
        """The layers of `confinement` that the kernel grants; () before a worker has started."""
        return self._workers.all[0].kept_from

    def check_workers(self) -> None:
        """Starts a worker, if the checker needs one, so that a failure shows before anything is
        loaded.

        Raises:
            ValueError: a worker cannot start, or cannot be confined as the checker requires.
        """
        if not self.checker.compare and self.checker.workers is None:
            return
        try:
            self._workers.all[0].start()
        except RuntimeError as error:
            raise ValueError(
                f"the verifier {self.checker.name} must start in a worker, which has no network "
                f"and almost no environment variables: {error}. Import nothing large in its file, "
                "such as torch"
            ) from error

    def close(self) -> None:
        """Stops the workers; a later call starts them again."""
        self._workers.stop()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def without_counted(answer: str | None, counted: str) -> str | None:
    """The answer without the end that `Grader.counted` returned."""
    return (
        answer if answer is None or not counted else answer.strip().removesuffix(counted).rstrip()
    )


def grade_golds(grader: Grader, answers: Sequence[str], golds: Sequence[str]) -> list[Grade]:
    """The grades of gold answers against themselves, in the form in which a model answers.

    UNPARSABLE if a gold cannot be parsed.
    """
    completions = [f"{SOLUTION_START}{answer}{SOLUTION_END}" for answer in answers]
    try:
        return grader.grade_many(completions, golds)
    except ValueError:  # one gold is invalid: grade each separately to learn which
        if len(completions) == 1:
            return [Grade.UNPARSABLE]
        pairs = zip(answers, golds, strict=True)
        return [grade_golds(grader, [answer], [gold])[0] for answer, gold in pairs]


def grade(completion: str, answer: str, *, time_limit: float = 5.0) -> Grade:
    """Grades one completion (`time_limit` in seconds). For many completions use a `Grader`."""
    with Grader(time_limit=time_limit) as grader:
        return grader.grade_many([completion], [answer])[0]
