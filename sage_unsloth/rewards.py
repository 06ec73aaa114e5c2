r"""Grades the answer inside a completion's solution tag, and turns grades into rewards.

What is inside the tag is graded and nothing else. Two plainly written numbers are compared exactly,
in this process; everything else goes to math-verify, both sides wrapped in `\boxed{}`, in a worker
process that is killed when it runs out of time (`workers`). math-verify's own limits are signals:
they fail off the main thread, and they cannot stop a power tower.
"""

import functools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from sage_unsloth.prompts import SOLUTION_END, SOLUTION_START
from sage_unsloth.records import package_version
from sage_unsloth.workers import LATE, Workers

LONGEST_ANSWER = 2_000  # characters; longer text in the tag is no answer
CACHED_PAIRS = 65_536


class Grade(StrEnum):
    """What became of one completion; only CORRECT is rewarded."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # no complete tag, or no mathematics in it, or over LONGEST_ANSWER
    TIMED_OUT = "timed out"  # or the worker died, as it does when it runs out of memory


def extract_answer(completion: str, *, boxed: bool = False) -> str | None:
    r"""The stripped text of the last complete solution tag, or None where there is none.

    An empty tag is the answer "". With `boxed`, a completion without a complete tag falls back to
    its last `\boxed{}`.
    """
    start = completion.rfind(SOLUTION_START, 0, max(completion.rfind(SOLUTION_END), 0))
    if start >= 0:
        start += len(SOLUTION_START)
        return completion[start : completion.find(SOLUTION_END, start)].strip()
    brace = completion.rfind(r"\boxed{") + len(r"\boxed") if boxed else -1
    end = _closing_brace(completion, brace) if completion[brace : brace + 1] == "{" else None
    return None if end is None else completion[brace + 1 : end].strip()


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace opened at `start` is closed, or None; escaped braces do not count."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return match.start()
    return None


# Each rule of normalising has tests of what it must not accept.
_CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\u00d7": r"\times "}
    | dict.fromkeys("\u00a0\u2009\u202f", " ")  # no-break and thin spaces
)
_WRAPPER = re.compile(
    r"\*\*([^*]*)\*\*|\$\$?([^$]*)\$\$?|\\boxed\{([^{}]*)\}|(.*[^.])(?<!\\right)\.", re.DOTALL
)
_PLAIN_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)\s*
    (?: (?:(?P<whole>\d+)\s+)?(?P<top>[1-9]\d*)\s*/\s*(?P<bottom>\d+)
      | \\[dt]?frac\s*(?P<over>\{\s*-?\d+\s*\}|\d)\s*(?P<under>\{\s*\d+\s*\}|\d)
      | (?P<digits>[1-9]\d{0,2}(?:(?P<sep>,|\ |\{,\}|,\\!|\\,)\d{3})(?:(?P=sep)\d{3})*|\d+|(?=\.\d))
        (?:\.(?P<decimals>\d*))?
        (?:(?:e|\s*\\(?:times|cdot)\s*10\^\{?)(?P<exponent>[+-]?\d{1,3})\}?)?
    )
    (?:\s+(?:dollars?|points?|people|grams?|weeks?))?  # units that math-verify 0.9 does not know
    """,
    re.VERBOSE | re.IGNORECASE,
)
# In answer to a plain number; math-verify reads "43 = 42", "> 42", "42 \text{ thousand}" as 42.
_NOT_THE_NUMBER = re.compile(
    r"[=<>≈≠≤≥]|\\(?:[lg]t|[lg]eq?|neq?|approx|sim)(?![a-zA-Z])"
    r"|\b(?:hundred|thousand|million|billion|trillion|dozen)s?\b"
)


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of a plainly written number, or None for any other text.

    Integers, decimals, fractions `3/4` and `\frac{3}{4}`, mixed numbers `1 3/4`, `1e3`; whole groups of thousands.
    """
    match = _PLAIN_NUMBER.fullmatch(text) if len(text) <= LONGEST_ANSWER else None
    if match is None:
        return None
    if match["top"]:
        top, bottom = int(match["top"]), int(match["bottom"])
        if bottom == 0 or (match["whole"] and top >= bottom):  # "1 234/5" may mean 1234/5
            return None
        value = Fraction(top, bottom) + int(match["whole"] or 0)
    elif match["over"]:
        top, bottom = (int(match[name].strip("{}")) for name in ("over", "under"))
        if bottom == 0:
            return None
        value = Fraction(top, bottom)
    else:
        digits, decimals = re.sub(r"\D", "", match["digits"]), match["decimals"] or ""
        exponent = int(match["exponent"] or 0) - len(decimals)
        value = int(digits + decimals) * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value


def unwrap(text: str) -> str:
    """The text without what people put around an answer: dollars, bold, a box, a full stop."""
    text = text.strip()
    while match := _WRAPPER.fullmatch(text):  # they nest: **$42$.**
        text = match[match.lastindex].strip()
    return text


def normalise(text: str) -> str | None:
    """The form in which `text` is compared, numbers as "42" or "7/4"; None if it is no answer."""
    if len(text) > LONGEST_ANSWER:
        return None
    text = unwrap(text.translate(_CHARACTERS))
    # A brace too many would close the box around the text; an inner box would be graded alone.
    balanced = _closing_brace("{" + text + "}", 0) == len(text) + 1
    if not text or not balanced or r"\boxed" in text:
        return None
    number = plain_number(text)
    return text if number is None else str(number)


def _grade_plainly(answer: str | None, gold: str) -> Grade | tuple[str, str]:
    """The grade where it takes no algebra, else the answer and gold that a worker compares."""
    normal_gold = normalise(gold) if isinstance(gold, str) else None
    if normal_gold is None:
        raise ValueError(
            f"a gold answer must be 1 to {LONGEST_ANSWER} characters of text with balanced braces "
            f"and no inner box; got {gold!r:.200}; drop or repair the row"
        )
    normal_answer = None if answer is None else normalise(answer)
    if normal_answer is None:
        return Grade.UNPARSABLE
    if plain_number(normal_gold) is not None:
        if plain_number(normal_answer) is not None:
            return Grade.CORRECT if normal_answer == normal_gold else Grade.WRONG
        normal_answer = re.sub(r"^[a-zA-Z]\s*=\s*", "", normal_answer)  # "x = 42" states 42
        if _NOT_THE_NUMBER.search(normal_answer):
            return Grade.WRONG
    return normal_answer, normal_gold


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> tuple:
    r"""What math-verify finds in `\boxed{text}`, in a worker; golds come again and again."""
    from math_verify import parse

    return tuple(parse(rf"\boxed{{{text}}}", parsing_timeout=None))


def compare_math(answer: str, gold: str) -> Grade | None:
    """Compares two normalised texts by math-verify, in a worker; None if the gold does not parse.

    A comparison that math-verify gives up on is WRONG: from outside, its failures look like False.
    """
    from math_verify import verify

    parsed = [list(_parse(text)) for text in (gold, answer)]
    # Beside what it understood, parse returns the text; alone, the text is a failure to parse.
    gold_found, answer_found = ([x for x in found if not isinstance(x, str)] for found in parsed)
    if not gold_found:
        return None
    if not answer_found:
        return Grade.UNPARSABLE
    return Grade.CORRECT if verify(*parsed, timeout_seconds=None) else Grade.WRONG


@dataclass(frozen=True, kw_only=True)
class Checker:
    """What makes an answer right.

    Attributes:
        name: in the record of a grade, with `version`.
        version: changes whenever the same answer may get another grade.
        packages: whose versions decide too.
        plainly: (extracted answer or None, gold) -> the grade, or the two texts that a worker compares. It must be fast on
            any text, and raises ValueError for a gold that is none.
        compare: "module:function" of a function of those two texts for a worker: a Grade, or None for a gold that cannot
            be read.
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


MATH = Checker(
    name="math",
    version=2,
    packages=("math-verify",),
    plainly=_grade_plainly,
    compare="sage_unsloth.rewards:compare_math",
)


def grading_workers() -> int:
    """Worker processes for this machine: answers that hang hold up one each."""
    return min(4, os.cpu_count() or 1)


class Grader:
    r"""Grades completions, from any thread; a context manager that stops its workers at the end.

    Args:
        workers: worker processes; they start with the first answer that needs one.
        time_limit: seconds for one answer in a worker, which is then killed and replaced.
        memory_limit_gib: address space of one worker, which needs about .1 GiB.
        boxed: without a complete tag, grade the last `\boxed{}`; for evaluation only.
        checker: what makes an answer right.
    """

    def __init__(
        self,
        workers: int = 1,
        time_limit: float = 5.0,
        memory_limit_gib: float = 1.0,
        boxed: bool = False,
        checker: Checker = MATH,
    ):
        self.boxed, self.checker = boxed, checker
        self._workers = Workers(checker.compare, workers, time_limit, memory_limit_gib)
        self._cache: dict[tuple[str | None, str], Grade] = {}  # least recently used first
        self._lock = threading.Lock()

    def grade_many(self, completions: Sequence[str], answers: Sequence[str]) -> list[Grade]:
        """One grade per completion, in order; equal pairs of answer and gold are graded once.

        Raises:
            ValueError: lengths differ, or a gold answer is None, empty or cannot be parsed.
            RuntimeError: a worker cannot start, or the code that it runs is broken.
        """
        extracted = [extract_answer(completion, boxed=self.boxed) for completion in completions]
        pairs = list(zip(extracted, answers, strict=True))
        with self._lock:
            grades = {
                pair: self._cache.pop(pair, None) or self.checker.plainly(*pair)
                for pair in dict.fromkeys(pairs)
            }
            hard = {pair: text for pair, text in grades.items() if not isinstance(text, Grade)}
            if hard:
                # Different answers may have one normal form.
                compared = self._compare_all(list(dict.fromkeys(hard.values())))
                grades.update({pair: compared[texts] for pair, texts in hard.items()})
            # Longer text is no answer; kept, a run of long ones would fill the memory.
            self._cache.update(
                (pair, grade)
                for pair, grade in grades.items()
                if len(pair[0] or "") <= LONGEST_ANSWER
            )
            while len(self._cache) > CACHED_PAIRS:
                del self._cache[next(iter(self._cache))]
        return [grades[pair] for pair in pairs]

    def _compare_all(self, questions: list[tuple[str, str]]) -> dict[tuple[str, str], Grade]:
        grades = {}
        for question, value in zip(questions, self._workers.ask(questions), strict=True):
            if value is None:
                raise ValueError(
                    f"a gold answer must parse; got {question[1]!r}; drop or repair the row"
                )
            grades[question] = Grade.TIMED_OUT if value is LATE else Grade(value)
        return grades

    @property
    def kept_from(self) -> tuple[str, ...]:
        """The layers of `confinement` that the kernel grants the workers; empty until one has started."""
        return self._workers.all[0].kept_from

    def close(self) -> None:
        """Stops the workers; a later call would start them again."""
        self._workers.stop()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def own_grade(grader: Grader, completion: str, gold: str) -> Grade:
    """The grade of a gold answer against itself; UNPARSABLE where it is no answer at all."""
    try:
        return grader.grade_many([completion], [gold])[0]
    except ValueError:
        return Grade.UNPARSABLE


def grade(completion: str, answer: str, *, time_limit: float = 5.0) -> Grade:
    """Grades one completion (`time_limit` in seconds); for many, a `Grader` keeps its workers."""
    with Grader(time_limit=time_limit) as grader:
        return grader.grade_many([completion], [answer])[0]


class SolutionReward:
    """TRL's reward function: 1.0 for a correct answer, else 0.0; counts the grades for the log."""

    __name__ = "solution_reward"  # TRL names the metric after it

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
        """Completions that are not trained on leave the counts; `batch` is what `last_batch` shall be.

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
