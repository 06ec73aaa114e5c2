"""Runs a function of two texts in worker processes, with limits on time and memory.

The texts are a model's, so a worker is confined before it sees the first one (`confinement`): no
network, no files to write, no further process, none of the caller's secrets. It is a plain
subprocess that talks in lines of JSON. A multiprocessing pool would import the caller's script
again in each worker, PyTorch with it, and would break where the script has no `__main__` guard. Not
for Windows.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from queue import SimpleQueue
from typing import IO, Any

from sage_unsloth.grading.confinement import allowed_environment, confine, leave_network

QUESTIONS_PER_WORKER = 2_000  # then a fresh one: SymPy's caches grow, and the memory is limited
START_LIMIT = 60.0  # seconds for a worker to import what its function needs, on a busy machine
LONGEST_REPLY = 2**20  # bytes: a traceback at most
# The reply of a worker that was killed for its time, or died, as it does without memory.
LATE = object()

logger = logging.getLogger(__name__)


def serve(function: str, time_limit: float, memory_limit_gib: float) -> None:
    """What a worker process runs.

    Lines of JSON: `[text, text]` in, and `{"value": ...}`, `{"error": ...}` or `{"refused": event}`
    out. The first line out says which layers of `confinement` it is in: `{"ready": [...]}`.
    """
    limit = int(memory_limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A machine that shuts down sends it to all processes, while the caller still needs its grades;
    # the worker ends with its pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kept_from = ["namespace"] if leave_network() else []
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints goes to stderr: only replies may reach the pipe
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    call("x", "x")  # pays for the imports

    def reply(message: dict) -> None:
        print(json.dumps(message), file=replies, flush=True)

    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    os.dup2(silence, 2)  # what a library says about an answer holds the answer's text
    os.close(silence)
    if confine(lambda event: reply({"refused": event})):
        kept_from.append("landlock")
    reply({"ready": kept_from})
    for line in sys.stdin:
        # The caller kills a late worker. The alarm ends one whose caller is gone, and the limit on
        # CPU time one that has turned the alarm off.
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit + 1)
        seconds = math.ceil(time.process_time() + 2 * time_limit + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            answer = {"value": call(*json.loads(line))}
        except MemoryError:
            raise  # the worker dies, and its caller knows what that means
        except Exception:
            answer = {"error": traceback.format_exc()}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(answer)


_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_unsloth.grading.workers import serve; serve(*json.loads(sys.argv[2]))"
)


class Worker:
    """One worker process, started by its first question and replaced after a death.

    Attributes:
        process: None where none runs.
        kept_from: "namespace" and "landlock", where the kernel grants them (`confinement`); set by
            `start`.
        deaths: how many had to be killed, or died, over a question.
    """

    def __init__(self, function: str, time_limit: float, memory_limit_gib: float):
        self.arguments = (function, time_limit, memory_limit_gib)
        self.process: subprocess.Popen | None = None
        self.kept_from: tuple[str, ...] = ()
        self.deaths = 0
        self.questions_left = 0

    def start(self) -> None:
        """Starts the process, after the end of the one before.

        Raises:
            RuntimeError: it is not ready within `START_LIMIT`.
        """
        self.stop()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path), json.dumps(self.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=allowed_environment(os.environ),
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
        self.questions_left = QUESTIONS_PER_WORKER
        ready = self.read_reply(START_LIMIT)
        if "ready" not in ready:
            self.stop()
            raise RuntimeError(
                f"a grading worker must start within {START_LIMIT:g} s and {self.arguments[2]:g} "
                "GiB; it did not, and its message is on stderr; install what it misses, or raise "
                "the limit"
            )
        self.kept_from = tuple(ready["ready"])

    def read_reply(self, time_limit: float) -> dict[str, Any]:
        """The next reply; {} if the process died, the time is over, or what came is no reply."""
        _, stdout = self._pipes()
        line, deadline = b"", time.monotonic() + time_limit
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not connection.wait([stdout.fileno()], left):
                return {}
            part = stdout.read(65_536)
            if not part or len(line) > LONGEST_REPLY:
                return {}
            line += part
        with contextlib.suppress(ValueError):
            reply = json.loads(line)
            return reply if isinstance(reply, dict) else {}
        return {}

    def ask(self, question: tuple[str, str]) -> Any:
        """The function's value for two texts; `LATE` where the worker had to be killed, or died.

        Raises:
            RuntimeError: the worker cannot start, or the function raised.
        """
        if self.process is None or self.process.poll() is not None or not self.questions_left:
            self.start()
        self.questions_left -= 1
        line = json.dumps(question).encode() + b"\n"
        try:
            self._write(line)
        except BrokenPipeError:  # it died while it was idle: not this question's doing
            self.start()
            self._write(line)
        reply = self.read_reply(self.arguments[1])
        if "error" in reply:
            raise RuntimeError(
                f"comparing {question[0]!r:.300} to {question[1]!r:.300} broke:\n{reply['error']}"
            )
        if "value" in reply:
            return reply["value"]
        if "refused" in reply:
            logger.warning(
                "An answer made its grading worker try %s: the worker was ended and the answer "
                "is not graded. Please report it: %r",
                reply["refused"],
                question[0][:300],
            )
        self.deaths += 1
        self.stop()
        return LATE

    def _write(self, line: bytes) -> None:
        stdin, _ = self._pipes()
        rest = memoryview(line)
        while rest:  # without a buffer, a long line may go in parts
            rest = rest[stdin.write(rest) :]

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Standard input and output of the process."""
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("a worker must run before it is asked; none does; call start()")
        return process.stdin, process.stdout

    def stop(self) -> None:
        """Kills the process, if one runs."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # reaps it and closes both pipes
            self.process = None


class Workers:
    """Several workers behind one queue.

    Args:
        function: "module:name" of a function of two texts whose value is JSON; the worker imports
            it, and calls it once with ("x", "x") before it is ready.
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
