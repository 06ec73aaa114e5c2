r"""Grades the answer inside a completion's solution tag, and turns grades into rewards.

What is inside the tag is graded and nothing else. Two plainly written numbers are compared exactly,
in this process; everything else goes to math-verify, both sides wrapped in `\boxed{}`, in a worker
process that is killed when it runs out of time. math-verify's own limits are signals: they fail off
the main thread, and they cannot stop a power tower.

A worker is a plain subprocess that talks in lines of JSON. A multiprocessing pool would import the
caller's script again in each worker, PyTorch with it, and would break where the script has no
`__main__` guard. Not for Windows.
"""

import json
import logging
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from fractions import Fraction
from multiprocessing import connection
from queue import SimpleQueue

from sage_unsloth.prompts import SOLUTION_END, SOLUTION_START

LONGEST_ANSWER = 2_000  # characters; longer text in the tag is no answer
CACHED_PAIRS = 65_536
PAIRS_PER_WORKER = 2_000  # then a fresh one: SymPy's caches grow, and the memory is limited
START_LIMIT = 60.0  # seconds for a worker to import math-verify, on a busy machine


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
    """The exact value of a plainly written number, or None for any other text.

    Integers, decimals, fractions `3/4`, mixed numbers `1 3/4`, `1e3`; whole groups of thousands.
    """
    match = _PLAIN_NUMBER.fullmatch(text) if len(text) <= LONGEST_ANSWER else None
    if match is None:
        return None
    if match["top"]:
        top, bottom = int(match["top"]), int(match["bottom"])
        if bottom == 0 or (match["whole"] and top >= bottom):  # "1 234/5" may mean 1234/5
            return None
        value = Fraction(top, bottom) + int(match["whole"] or 0)
    else:
        digits, decimals = re.sub(r"\D", "", match["digits"]), match["decimals"] or ""
        exponent = int(match["exponent"] or 0) - len(decimals)
        value = int(digits + decimals) * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value


def normalise(text: str) -> str | None:
    """The form in which `text` is compared, numbers as "42" or "7/4"; None if it is no answer."""
    if len(text) > LONGEST_ANSWER:
        return None
    text = text.translate(_CHARACTERS).strip()
    while match := _WRAPPER.fullmatch(text):  # they nest: **$42$.**
        text = match[match.lastindex].strip()
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


def _compare(answer: str, gold: str) -> Grade | None:
    """Compares two normalised texts by math-verify, in a worker; None if the gold does not parse.

    A comparison that math-verify gives up on is WRONG: from outside, its failures look like False.
    """
    from math_verify import parse, verify

    parsed = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    # Beside what it understood, parse returns the text; alone, the text is a failure to parse.
    gold_found, answer_found = ([x for x in found if not isinstance(x, str)] for found in parsed)
    if not gold_found:
        return None
    if not answer_found:
        return Grade.UNPARSABLE
    return Grade.CORRECT if verify(*parsed, timeout_seconds=None) else Grade.WRONG


def _serve(time_limit: float, memory_limit_gib: float) -> None:
    """A worker: `[answer, gold]` a line in; `{"grade": ...}` or `{"error": ...}` a line out."""
    import resource

    limit = int(memory_limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.CRITICAL)
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing but replies may reach the pipe
    _compare("x", "x")  # pays for the imports
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        # The caller kills a late worker; this alarm ends one whose caller is gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit + 1)
        try:
            reply = {"grade": _compare(*json.loads(line))}
        except MemoryError:
            raise  # the worker dies, and its caller knows what that means
        except Exception:
            reply = {"error": traceback.format_exc()}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


_START_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_unsloth.rewards import _serve; _serve(*json.loads(sys.argv[2]))"
)


class _Worker:
    """One worker process, started by its first pair and replaced after a death."""

    def __init__(self, time_limit: float, memory_limit_gib: float):
        self.limits = (time_limit, memory_limit_gib)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.stop()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START_WORKER, json.dumps(sys.path), json.dumps(self.limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
        self.pairs_left = PAIRS_PER_WORKER
        if self.read_line(START_LIMIT) != "ready\n":
            self.stop()
            raise RuntimeError(
                f"a grading worker must start within {START_LIMIT:g} s and {self.limits[1]:g} GiB; "
                "it did not, and its message is on stderr; install math-verify, or raise the limit"
            )

    def read_line(self, time_limit: float) -> str:
        """The next line, or "" where the process died or the time is over."""
        stdout = self.process.stdout
        return stdout.readline() if connection.wait([stdout], time_limit) else ""

    def grade(self, answer: str, gold: str) -> Grade:
        if self.process is None or self.process.poll() is not None or not self.pairs_left:
            self.start()
        self.pairs_left -= 1
        self.process.stdin.write(json.dumps([answer, gold]) + "\n")
        self.process.stdin.flush()
        line = self.read_line(self.limits[0])
        if not line:
            self.stop()
            return Grade.TIMED_OUT
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"comparing {answer!r} to {gold!r} broke:\n{reply['error']}")
        if reply["grade"] is None:
            raise ValueError(f"a gold answer must parse; got {gold!r}; drop or repair the row")
        return Grade(reply["grade"])

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # reaps it and closes both pipes
            self.process = None


class Grader:
    r"""Grades completions, from any thread; a context manager that stops its workers at the end.

    Args:
        workers: worker processes; they start with the first answer that needs one.
        time_limit: seconds for one answer in a worker, which is then killed and replaced.
        memory_limit_gib: address space of one worker, which needs about .1 GiB.
        boxed: without a complete tag, grade the last `\boxed{}`; for evaluation only.
    """

    def __init__(
        self, workers: int = 1, time_limit: float = 5.0, memory_limit_gib: float = 1.0, boxed=False
    ):
        if workers < 1 or time_limit <= 0 or memory_limit_gib <= 0:
            raise ValueError(
                "workers must be >= 1 and both limits > 0; "
                f"got {workers=}, {time_limit=}, {memory_limit_gib=}"
            )
        self.boxed = boxed
        self._workers = [_Worker(time_limit, memory_limit_gib) for _ in range(workers)]
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
                pair: self._cache.pop(pair, None) or _grade_plainly(*pair)
                for pair in dict.fromkeys(pairs)
            }
            hard = {pair: text for pair, text in grades.items() if not isinstance(text, Grade)}
            if hard:
                grades.update(zip(hard, self._ask(hard.values()), strict=True))
            self._cache.update(grades)
            while len(self._cache) > CACHED_PAIRS:
                del self._cache[next(iter(self._cache))]
        return [grades[pair] for pair in pairs]

    def _ask(self, questions) -> list[Grade]:
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def ask(question: tuple[str, str]) -> Grade:
            worker = idle.get()
            try:
                return worker.grade(*question)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(ask, questions))

    def close(self) -> None:
        """Stops the workers; a later call would start them again."""
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


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

    def pop_counts(self) -> dict[str, int]:
        """How many completions got each grade since the last call; every grade has a key."""
        counts, self._counts = self._counts, Counter()
        return {grade.value: counts[grade] for grade in Grade}


def _text(turns: str | list[dict] | None) -> str | None:
    """A text as it is; of a list of messages the last one's content."""
    return turns[-1]["content"] if isinstance(turns, list) else turns
