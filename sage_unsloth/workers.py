"""Runs a function of two texts in worker processes that are killed when they run out of time or memory.

A worker is a plain subprocess that talks in lines of JSON. A multiprocessing pool would import the
caller's script again in each worker, PyTorch with it, and would break where the script has no
`__main__` guard. Not for Windows.
"""

import importlib
import json
import logging
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any

QUESTIONS_PER_WORKER = 2_000  # then a fresh one: SymPy's caches grow, and the memory is limited
START_LIMIT = 60.0  # seconds for a worker to import what its function needs, on a busy machine
LATE = (
    object()
)  # the reply of a worker that was killed for its time, or died, as it does without memory


def serve(function: str, time_limit: float, memory_limit_gib: float) -> None:
    """A worker: `[text, text]` a line in; `{"value": ...}` or `{"error": ...}` a line out."""
    import resource

    limit = int(memory_limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Sent to all processes of a machine that is taken away, while the caller still needs its grades; it ends with its pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing but replies may reach the pipe
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    call("x", "x")  # pays for the imports
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        # The caller kills a late worker; this alarm ends one whose caller is gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit + 1)
        try:
            reply = {"value": call(*json.loads(line))}
        except MemoryError:
            raise  # the worker dies, and its caller knows what that means
        except Exception:
            reply = {"error": traceback.format_exc()}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_unsloth.workers import serve; serve(*json.loads(sys.argv[2]))"
)


class Worker:
    """One worker process, started by its first question and replaced after a death."""

    def __init__(self, function: str, time_limit: float, memory_limit_gib: float):
        self.arguments = (function, time_limit, memory_limit_gib)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.stop()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps(self.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
        self.questions_left = QUESTIONS_PER_WORKER
        if self.read_line(START_LIMIT) != "ready\n":
            self.stop()
            raise RuntimeError(
                f"a grading worker must start within {START_LIMIT:g} s and {self.arguments[2]:g} GiB; "
                "it did not, and its message is on stderr; install what it misses, or raise the limit"
            )

    def read_line(self, time_limit: float) -> str:
        """The next line, or "" where the process died or the time is over."""
        stdout = self.process.stdout
        return stdout.readline() if connection.wait([stdout], time_limit) else ""

    def ask(self, question: tuple[str, str]) -> Any:
        if self.process is None or self.process.poll() is not None or not self.questions_left:
            self.start()
        self.questions_left -= 1
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.read_line(self.arguments[1])
        if not line:
            self.stop()
            return LATE
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(
                f"comparing {question[0]!r} to {question[1]!r} broke:\n{reply['error']}"
            )
        return reply["value"]

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # reaps it and closes both pipes
            self.process = None


class Workers:
    """Several workers behind one queue.

    Args:
        function: "module:name" of a function of two texts whose value is JSON; the worker imports it, and calls it once
            with ("x", "x") before it is ready.
        count: worker processes; they start with the first question that needs one.
        time_limit: seconds for one question, after which its worker is killed and replaced.
        memory_limit_gib: address space of one worker.
    """

    def __init__(self, function: str, count: int, time_limit: float, memory_limit_gib: float):
        if count < 1 or time_limit <= 0 or memory_limit_gib <= 0:
            raise ValueError(
                "workers must be >= 1 and both limits > 0; "
                f"got workers={count}, {time_limit=}, {memory_limit_gib=}"
            )
        self.all = [Worker(function, time_limit, memory_limit_gib) for _ in range(count)]

    def ask(self, questions: Iterable[tuple[str, str]]) -> list[Any]:
        """The values, in order; `LATE` where a worker had to be killed.

        Raises:
            RuntimeError: a worker cannot start, or the function raised.
        """
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.all:
            idle.put(worker)

        def ask(question: tuple[str, str]) -> Any:
            worker = idle.get()
            try:
                return worker.ask(question)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self.all)) as threads:
            return list(threads.map(ask, questions))

    def stop(self) -> None:
        """Stops them; a later question would start them again."""
        for worker in self.all:
            worker.stop()
