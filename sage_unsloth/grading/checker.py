"""The grades that a completion can get, and the interface of what decides between them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sage_unsloth.runs.record import package_version

LONGEST_ANSWER = 2_000  # characters; longer text in the tag is no answer


class Grade(StrEnum):
    """The outcome of grading one completion; only CORRECT is rewarded."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # no complete tag, or no mathematics in it, or over LONGEST_ANSWER
    TIMED_OUT = "timed out"  # or the worker died, as it does when it runs out of memory


@dataclass(frozen=True, kw_only=True)
class Checker:
    """What makes an answer right.

    Attributes:
        name: in the record of a grade, with `version`.
        version: changes whenever the same answer may get another grade.
        packages: whose versions decide too.
        plainly: (extracted answer or None, gold) -> the grade, or the two texts that a worker
            compares. It runs in the caller's process, so it must be fast on any text. It raises
            ValueError for a gold that is none.
        compare: "module:function" of the function that compares those two texts in a worker: a
            Grade, or None for a gold that cannot be read.
    """

    name: str
    version: int
    packages: tuple[str, ...] = ()
    plainly: Callable[[str | None, str], Grade | tuple[str, str]]
    compare: str = ""

    @property
    def label(self) -> str:
        """Name and versions, as records keep them."""
        parts = [f"{package} {package_version(package)}" for package in self.packages]
        return ", ".join([f"{self.name} {self.version}", *parts])
