"""Several workers behind one queue, and how long a batch of questions may hold them up."""

import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from sage_unsloth.grading.worker import LATE, Worker

BATCH_LIMITS = 8
"""A batch may lose so many time limits to questions that reach theirs (`Workers.ask`)."""
QUICK, LEAST = 1 / 20, 0.1
"""The first time limit of a question of a large batch: this part of the whole one at most, and this
many seconds at least."""
# The value of a question that reached the first limit when a batch had no time left for the whole.
CUT_SHORT = object()

logger = logging.getLogger(__name__)


class Workers:
    """Several workers behind one queue.

    Args:
        function: "module:name" of a function of two texts whose value is JSON; the worker imports
            it, and calls it with ("x", "x") before it is ready.
        count: worker processes; they start with the first question that needs one.
        time_limit: seconds for one question, after which the child that it was put to is killed.
        memory_limit_gib: address space of one worker.
        typical: further questions, asked before the worker is ready.
    """

    def __init__(
        self,
        function: str,
        count: int,
        time_limit: float,
        memory_limit_gib: float,
        typical: Sequence[tuple[str, str]] = (),
    ):
        if count < 1 or time_limit <= 0 or memory_limit_gib <= 0:
            raise ValueError(
                f"workers must be >= 1 and both limits > 0, got workers={count}, {time_limit=}, "
                f"{memory_limit_gib=}"
            )
        self.all = [Worker(function, time_limit, memory_limit_gib, typical) for _ in range(count)]
        self.time_limit = time_limit

    def ask(self, questions: Iterable[tuple[str, str]]) -> list[Any]:
        r"""The values, in order; `LATE` or `CUT_SHORT` where a question has none.

        Of n questions all are asked with a short limit of CPU time first, so that none waits behind
        those that hang, and a busy machine makes none late:

            min(`QUICK` time limits, `BATCH_LIMITS` / 2 time limits * workers / n),

        yet at least `LEAST` seconds. Those that reach it are asked again with the whole limit, in
        order, until `BATCH_LIMITS` / 2 time limits of every worker went to questions that reach
        this one too; the rest is `CUT_SHORT`. So questions that hang hold up a batch for about
        `BATCH_LIMITS` time limits, and questions that come to an end are asked, however many they
        are. A batch that is small enough is asked once, with the whole limit.

        Raises:
            RuntimeError: a worker cannot start, or the function raised.
        """
        questions = list(questions)
        half = BATCH_LIMITS / 2 * self.time_limit * len(self.all)
        share = half / max(1, len(questions))
        if share >= self.time_limit:
            return self._ask_all(questions, None, half)
        quick = min(self.time_limit, max(LEAST, min(share, QUICK * self.time_limit)))
        values = self._ask_all(questions, quick)
        late = [i for i, value in enumerate(values) if value is LATE]
        again = self._ask_all([questions[i] for i in late], None, half)
        for i, value in zip(late, again, strict=True):
            values[i] = value
        cut_short = sum(value is CUT_SHORT for value in again)
        if cut_short:
            logger.warning(
                "%d of the %d answers that a batch needed workers for came to no end: %d in %.3g "
                "s, and %d in %.3g s, which had no longer because the time of the batch was over. "
                "All of them count as timed out.",
                sum(value in (LATE, CUT_SHORT) for value in again),
                len(questions),
                sum(value is LATE for value in again),
                self.time_limit,
                cut_short,
                quick,
            )
        return values

    def _ask_all(
        self, questions: Sequence[tuple[str, str]], cpu_limit: float | None, most: float = math.inf
    ) -> list[Any]:
        """The values, in order; `CUT_SHORT` once `most` seconds of workers went to late ones."""
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.all:
            idle.put(worker)
        late: list[float] = []

        def ask(question: tuple[str, str]) -> Any:
            worker = idle.get()
            try:
                value = worker.ask(question, cpu_limit) if sum(late) < most else CUT_SHORT
            finally:
                idle.put(worker)
            if value is LATE:
                late.append(self.time_limit)
            return value

        with ThreadPoolExecutor(len(self.all)) as threads:
            return list(threads.map(ask, questions))

    def stop(self) -> None:
        """Stops them; a later question would start them again."""
        for worker in self.all:
            worker.stop()
