"""Several workers that share one queue, and a limit on the time of a batch."""

import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from sage_unsloth.grading.worker import LATE, Worker

BATCH_LIMITS = 8
"""Number of time limits that a batch may lose to questions that reach theirs (`Workers.ask`)."""
QUICK_FRACTION, QUICK_MINIMUM = 1 / 20, 0.1
"""First time limit of a question in a large batch: at most this part of the full one, and at least
this many seconds."""
# The value of a question that reached the first limit, with no time left in the batch for the full.
CUT_SHORT = object()

logger = logging.getLogger(__name__)


class Workers:
    """Several workers that share one queue.

    Args:
        function: "module:name" of a function of two texts whose value is JSON; the worker imports
            it, and calls it with ("x", "x") before it is ready.
        count: processes, started by the first question that needs one.
        time_limit: seconds for one question, after which its child is killed.
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
        """The values, in order; `LATE` or `CUT_SHORT` for a question without one.

        All n questions are first asked with a short limit of CPU time, so that none waits for those
        that hang, and a busy machine makes none late:

            max(`QUICK_MINIMUM` seconds,
                min(`QUICK_FRACTION`, `BATCH_LIMITS` / 2 * workers / n) time limits).

        Those that reach it are asked again with the full limit, in order, until every worker has
        spent `BATCH_LIMITS` / 2 time limits on late questions; the rest is `CUT_SHORT`. So hanging
        questions delay a batch by about `BATCH_LIMITS` time limits, and every question that ends
        gets its value. A small batch is asked once, with the full limit.

        Raises:
            RuntimeError: a worker cannot start, or the function raised.
        """
        questions = list(questions)
        half = BATCH_LIMITS / 2 * self.time_limit * len(self.all)
        share = half / max(1, len(questions))
        if share >= self.time_limit:
            return self._ask_all(questions, None, half)
        quick = min(
            self.time_limit, max(QUICK_MINIMUM, min(share, QUICK_FRACTION * self.time_limit))
        )
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
        """The values, in order; `CUT_SHORT` once late questions took `most` seconds of workers."""
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
        """Stops all; a later question starts them again."""
        for worker in self.all:
            worker.stop()
