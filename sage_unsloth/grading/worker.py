"""A worker that runs a function of two texts, with limits on time and memory.

The texts come from a model, so a worker is confined before it sees the first one (`confinement`):
no network, no files to write, no processes, no secrets. It is a plain subprocess that talks in
lines of JSON (`worker_process`): a multiprocessing pool would import the caller's script again in
each worker, with PyTorch, and would break without a `__main__` guard. Not for Windows.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from sage_unsloth.grading.confinement import allowed_environment
from sage_unsloth.own_code import OwnCodeError

QUESTIONS_PER_CHILD = 2_000  # then a fresh one, in case memory leaks
START_LIMIT = 60.0  # seconds for a worker to import what its function needs, on a busy machine
LONGEST_REPLY = 2**20  # bytes: a traceback at most
WALL_CLOCK_FACTOR = 3
"""A limit in CPU seconds is also one of this many times as long on the wall clock."""
# The value of a question whose child was killed for its time, or died twice.
LATE = object()

logger = logging.getLogger(__name__)

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_unsloth.grading.worker_process import serve; serve(*json.loads(sys.argv[2]))"
)


class Worker:
    """One worker, started by its first question.

    Attributes:
        process: forks the children that answer; None if not running.
        pid: of the child that answers; None between two of them.
        kept_from: "namespace" and "landlock", where the kernel grants them (`confinement`); set by
            `start`.
        deaths: number of children that were killed or died over a question.
    """

    def __init__(
        self,
        function: str,
        time_limit: float,
        memory_limit_gib: float,
        typical: Sequence[tuple[str, str]] = (),
    ):
        self.arguments = (function, time_limit, memory_limit_gib, typical)
        self.process: subprocess.Popen | None = None
        self.pid: int | None = None
        self.kept_from: tuple[str, ...] = ()
        self.deaths = 0
        self._num_questions = 0  # questions to this child
        self._number = 0  # of the last question
        self._questions = self._replies = self._ready = -1  # file descriptors

    def start(self) -> None:
        """Starts the process, after stopping the old one.

        Raises:
            RuntimeError: it is not ready within `START_LIMIT`.
        """
        self.stop()
        self._ready, child_end = os.pipe()
        self.process = subprocess.Popen(
            [
                # -P: the current folder, which may be the user's, is not searched for modules.
                *(sys.executable, "-P", "-c", _START),
                *(json.dumps(sys.path), json.dumps([*self.arguments, child_end])),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[child_end],
            env=allowed_environment(os.environ),
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
        os.close(child_end)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        if not self._await_child():
            self.stop()
            raise RuntimeError(
                f"a grading worker did not start within {START_LIMIT:g} s and "
                f"{self.arguments[2]:g} GiB (its message is on stderr)"
            )

    def _await_child(self) -> bool:
        """Waits for a child that can be asked; whether there is one."""
        line, deadline = b"", time.monotonic() + START_LIMIT
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not connection.wait([self._ready], left):
                return False
            part = os.read(self._ready, 65_536)
            if not part:
                return False
            line += part
        result = json.loads(line.splitlines()[-1])
        self.pid, self.kept_from, self._num_questions = result["pid"], tuple(result["kept_from"]), 0
        # Drops what the last child wrote, or the next question would get the reply to an old one.
        while connection.wait([self._replies], 0) and os.read(self._replies, 65_536):
            pass
        return True

    def ask(self, question: tuple[str, str], cpu_limit: float | None = None) -> Any:
        """The function's value for two texts, or `LATE`.

        A child may lack memory because of earlier questions, and a library may then call a text
        unreadable. So the question is repeated in a fresh child if one died, or if the value is
        None.

        Args:
            cpu_limit: CPU seconds of the child, where the system reports them; None for the
                worker's own time limit.

        Raises:
            RuntimeError: the worker cannot start, or the function raised.
            OwnCodeError: a custom verifier raised.
        """
        if self._num_questions >= QUESTIONS_PER_CHILD:
            self._end_child()
        reply = self._ask_child(question, cpu_limit)
        # Not for a fresh child: asking it again would give the same.
        if reply is None or (self._num_questions > 1 and reply.get("value", "") is None):
            self._end_child()
            reply = self._ask_child(question, cpu_limit)
        if reply is None:
            reply = {}
        if "told" in reply:
            logger.error("%s", reply["error"])
            raise OwnCodeError(reply["told"])
        if "error" in reply:
            raise RuntimeError(
                f"comparing {question[0]!r:.300} to {question[1]!r:.300} broke:\n{reply['error']}"
            )
        if "value" in reply:
            if reply.get("last"):
                self.pid = None
            return reply["value"]
        if "refused" in reply:
            logger.warning(
                "An answer made its grading worker try %s: the worker was ended and the answer "
                "is not graded. Please report it: %r",
                reply["refused"],
                question[0][:300],
            )
        self.deaths += 1
        self._end_child()
        return LATE

    def _ask_child(
        self, question: tuple[str, str], cpu_limit: float | None
    ) -> dict[str, Any] | None:
        """The current child's reply; {} if there was none in time, None if it died."""
        runs = self.process is not None and self.process.poll() is None
        if not runs or (self.pid is None and not self._await_child()):
            self.start()
        self._number += 1
        self._num_questions += 1
        line = memoryview(json.dumps([self._number, *question]).encode() + b"\n")
        try:
            while line:  # a long one may go in parts
                line = line[os.write(self._questions, line) :]
        except BrokenPipeError:
            return None
        reply: dict[str, Any] = {}
        deadline = time.monotonic() + (self.arguments[1] if cpu_limit is None else cpu_limit)
        latest, computed = deadline, self._computed()
        if cpu_limit is not None and computed is not None:
            # Under load a child gets less than a processor. Its limit is of CPU time, and the wall
            # clock only ends one that sleeps.
            latest += (WALL_CLOCK_FACTOR - 1) * cpu_limit
        while reply.get("number") != self._number and "refused" not in reply:
            received = self._read_reply(deadline)
            if not received:
                left = self._cpu_left(cpu_limit, computed)
                if received is None or left <= 0 or deadline >= latest:
                    return received
                deadline = min(latest, deadline + left)
                continue
            reply = received
        if "refused" not in reply and not reply.get("last") and connection.wait([self._ready], 0):
            self._await_child()  # the child before it had died, and this one has answered
        return reply

    def _computed(self) -> float | None:
        """CPU seconds of the child so far; None if the system does not report them."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        # After the last ")", because the name of a process may contain spaces and brackets.
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _cpu_left(self, cpu_limit: float | None, before: float | None) -> float:
        """CPU seconds left; 0 without a limit or without a report."""
        now = self._computed()
        if cpu_limit is None or before is None or now is None:
            return 0.0
        return cpu_limit - (now - before)

    def _read_reply(self, deadline: float) -> dict[str, Any] | None:
        """The next line; {} if the time is over or it is not a reply, None if the child ended."""
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            waiting = connection.wait([self._replies, self._ready], max(left, 0))
            if not waiting:
                return {}
            if self._replies not in waiting:  # another child is ready
                self.pid = None
                return None
            part = os.read(self._replies, 65_536)
            line += part
            if not part or len(line) > LONGEST_REPLY:
                self._end_child()
                return {} if part else None
        with contextlib.suppress(ValueError):
            # An earlier line answers a question that was repeated.
            reply = json.loads(line.splitlines()[-1])
            return reply if isinstance(reply, dict) else {}
        return {}

    def _end_child(self) -> None:
        """Kills the child, if one can be asked; the next is forked meanwhile."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.pid = None

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            # The whole group, since children were forked from it.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.__exit__(None, None, None)  # closes the pipes, at which a child ends
        os.close(self._ready)
        self.process = self.pid = None
