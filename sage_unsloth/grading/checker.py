"""The grades of a completion, and the interface of a checker."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sage_unsloth.runs.record import package_version

LONGEST_ANSWER = 2_000  # characters; longer text in the tag is no answer


class Grade(StrEnum):
    """The outcome of grading one completion; only CORRECT is rewarded."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # no complete tag, or no mathematics in it, or over LONGEST_ANSWER
    TIMED_OUT = "timed out"  # or the worker died, as it does when it runs out of memory


class Kind(StrEnum):
    """How an answer was compared with its gold."""

    NUMBER = "number"  # exact
    QUANTITY = "number with unit"
    TEXT = "text"
    CHOICE = "choice"  # the letter of an option
    SET = "set"
    TUPLE = "tuple"
    INTERVAL = "interval"
    EQUATION = "equation"
    MATHEMATICS = "mathematics"  # by the values of expressions
    EXPRESSION = "expression"  # of given numbers, by its value
    ROLES = "roles"  # of knights and knaves
    SCORER = "scorer"  # the task's own
    PATTERN = "pattern"  # a regular expression
    SCHEMA = "schema"  # of JSON
    TESTS = "tests"  # that a program passes
    OWN = "own verifier"
    NONE = "none"  # there was nothing to compare, or no time


class Verdict(NamedTuple):
    """A grade and its kind. A tuple, so that a worker can send it as JSON."""

    grade: Grade
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Checker:
    """Decides whether an answer is correct.

    Attributes:
        name: recorded with each grade, together with `version`.
        version: changes whenever the same answer may get another grade.
        packages: their versions are recorded too.
        plainly: (extracted answer or None, gold) -> the verdict, or the two texts that a worker
            compares. Runs in the caller's process, so it must be fast on any text. Raises
            ValueError for an invalid gold.
        compare: "module:function" that compares those two texts in a worker: a Verdict, or None for
            a gold that cannot be read.
        typical: pairs that a worker compares before its first question, so that libraries build
            their caches before the fork.
        workers: (count, time limit in seconds, memory limit in GiB) -> workers; None for processes
            that run `compare`.
        gold_is_answer: a gold is also an answer, correct against itself; false for patterns,
            schemas and the tests of a program.
        counted: (answer, gold, problem) -> the words at the end of the answer that only name what
            its number counts, according to the problem. They are not graded.
        longest: characters of an answer; longer text is no answer.
        blocks: without a tag, the last block of code is the answer (`extraction`).
    """

    name: str
    version: int | str
    packages: tuple[str, ...] = ()
    plainly: Callable[[str | None, str], Verdict | tuple[str, str]]
    compare: str = ""
    typical: tuple[tuple[str, str], ...] = ()
    workers: Callable[[int, float, float], Any] | None = None
    gold_is_answer: bool = True
    counted: Callable[[str, str, str], str] | None = None
    longest: int = LONGEST_ANSWER
    blocks: bool = False

    def check_gold(self, gold: str) -> None:
        """Raises ValueError if this checker cannot read the gold."""
        self.plainly(None, gold)

    @property
    def label(self) -> str:
        """Name and versions, as recorded."""
        parts = [f"{package} {package_version(package)}" for package in self.packages]
        return ", ".join([f"{self.name} {self.version}", *parts])
