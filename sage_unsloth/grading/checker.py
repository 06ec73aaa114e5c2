"""The grades that a completion can get, and the interface of what decides between them."""

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
    """As what an answer was compared with its gold, which is how it reached its grade."""

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
    """A grade, and how it was reached. A tuple, so that a worker can send it as JSON."""

    grade: Grade
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Checker:
    """What makes an answer right.

    Attributes:
        name: in the record of a grade, with `version`.
        version: changes whenever the same answer may get another grade.
        packages: whose versions decide too.
        plainly: (extracted answer or None, gold) -> the verdict, or the two texts that a worker
            compares. It runs in the caller's process, so it must be fast on any text. It raises
            ValueError for a gold that is none.
        compare: "module:function" of the function that compares those two texts in a worker: a
            Verdict, or None for a gold that cannot be read.
        typical: what a worker compares before its first question, so that what libraries build at
            first use is there in each of its children.
        workers: makes the workers, from their count, time limit (seconds) and memory limit (GiB),
            where they are others than processes that run `compare`.
        gold_is_answer: a gold is an answer too, and right against itself; a pattern, a schema and
            the tests of a program are none.
        counted: (answer, gold, problem) -> the words at the end of the answer that only name what
            its number counts, by the problem's text; they are left off. None where no word is.
        longest: characters of an answer; longer text is no answer.
        blocks: where no tag holds an answer, the last block of code is it (`extraction`).
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
        """Raises ValueError if the gold is none that this checker can read."""
        self.plainly(None, gold)

    @property
    def label(self) -> str:
        """Name and versions, as records keep them."""
        parts = [f"{package} {package_version(package)}" for package in self.packages]
        return ", ".join([f"{self.name} {self.version}", *parts])
