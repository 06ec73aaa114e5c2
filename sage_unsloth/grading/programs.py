"""The verifier `python`: a program is correct if it passes every test of its gold.

A program runs in its own process, confined by the kernel (`program_server`), which gets only the
test's input. Its output is compared here, so nothing it does to Python changes the comparison, and
the expected output is out of its reach.
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import connection
from typing import Any

from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.confinement import allowed_environment
from sage_unsloth.grading.extraction import strip_fence
from sage_unsloth.grading.program_server import NOT_PYTHON
from sage_unsloth.grading.program_tests import read_tests
from sage_unsloth.grading.worker import LATE, START_LIMIT, WALL_CLOCK_FACTOR
from sage_unsloth.grading.workers import Workers

LONGEST_PROGRAM = 20_000  # characters
DENIALS = ("files", "network", "processes", "limits")
"""What must be denied to a program; "limits": limits, affinity and priority of other processes."""
GRACE = 20.0  # seconds, for the server to end what it killed

logger = logging.getLogger(__name__)

# The package is imported by the caller's path, which programs then do not see.
_START = (
    "import json, sys; own = sys.path[:]; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_unsloth.grading.program_server import serve_programs; sys.path[:] = own; "
    "serve_programs(float(sys.argv[2]))"
)


class ProgramWorker:
    """Asks one program server, which its first question starts.

    Attributes:
        kept_from: which of `DENIALS` programs are denied; set by `start`.
        namespaces: `program_confinement.Namespaces.granted` of the server; set by `start`.
        replaced: servers that were replaced because their settings had changed.
    """

    def __init__(self, time_limit: float, memory_limit_gib: float, allow_unconfined: bool) -> None:
        self.time_limit, self.memory_limit_gib = time_limit, memory_limit_gib
        self.allow_unconfined = allow_unconfined
        self.process: subprocess.Popen | None = None
        self.kept_from: tuple[str, ...] = ()
        self.namespaces: tuple[str, ...] = ()
        self.replaced = 0

    def start(self) -> None:
        """Starts the server, after stopping the old one.

        Raises:
            RuntimeError: it does not start.
            ValueError: the kernel cannot confine programs, and `allow_unconfined` is not set.
        """
        self.stop()
        environment = allowed_environment(os.environ) | {"PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-E", "-s", "-S", "-P", "-c", _START),
                *(json.dumps(sys.path), str(self.memory_limit_gib)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        try:
            first, _ = self._reply(START_LIMIT, 0)
        except (TimeoutError, EOFError):
            self.stop()
            raise RuntimeError(
                f"the process that runs programs did not start within {START_LIMIT:g} s and "
                f"{self.memory_limit_gib:g} GiB (its message is on stderr)"
            ) from None
        self.kept_from, self.namespaces = tuple(first["kept_from"]), tuple(first["namespaces"])
        lacking = [name for name in DENIALS if name not in self.kept_from]
        if not lacking:
            return
        if not self.allow_unconfined:
            self.stop()
            raise ValueError(
                f"programs that a model writes must be confined ({', '.join(DENIALS)}), but this "
                f"system cannot confine {', '.join(lacking)}. Use Linux 5.13 or newer with "
                "Landlock and seccomp, or allow_unconfined=True (--allow-unconfined) where nothing "
                "on the machine can be lost"
            )
        logger.warning(
            "Programs of the model run without being kept from %s by the kernel, because "
            "allow_unconfined is set.",
            ", ".join(lacking),
        )

    def ask(self, question: tuple[str, str], cpu_limit: float | None = None) -> Any:
        """The grade and the kind of a program against its tests, or `LATE`.

        Args:
            cpu_limit: seconds that suffice for most programs; None for the worker's own limit. Both
                are wall-clock limits for all tests together.

        Raises:
            RuntimeError: the server does not start.
        """
        program, gold = question
        tests = read_tests(gold)
        # The clock here is the wall's, so a CPU limit gets its margin for a busy machine.
        seconds = self.time_limit if cpu_limit is None else WALL_CLOCK_FACTOR * cpu_limit
        deadline = time.monotonic() + min(seconds, self.time_limit)
        for number, request in enumerate(tests.requests):
            left = deadline - time.monotonic()
            answer = self._run(request | {"program": program}, left, tests.longest_results)
            if answer is None or answer[0]["end"] == "late":
                return LATE
            reply, results = answer
            ended = reply["end"] == "exit"
            if ended and reply["status"] == NOT_PYTHON and reply["empty"]:
                return [Grade.UNPARSABLE, Kind.NONE]
            done = ended and reply["status"] == 0
            if not done or not tests.passes(number, reply["digest"], results):
                return [Grade.WRONG, Kind.TESTS]
        return [Grade.CORRECT, Kind.TESTS]

    def _run(
        self, request: dict[str, Any], seconds: float, longest: int
    ) -> tuple[dict[str, Any], bytes] | None:
        """The server's reply and the results; None if there is none.

        A server that died, or whose settings changed, is replaced, and the new one gets the same
        request once.
        """
        if seconds <= 0:
            return None
        line = json.dumps(request | {"seconds": seconds}).encode() + b"\n"
        for _ in range(2):
            if self.process is None or self.process.poll() is not None:
                self.start()
            try:
                self._send(line, seconds + GRACE)
                reply, results = self._reply(seconds + GRACE, longest)
            except TimeoutError:
                self.stop()
                return None
            except (BrokenPipeError, EOFError):
                self.stop()
                continue
            if not reply["moved"]:
                return reply, results
            self.replaced += 1
            self.stop()
        return None

    def _send(self, line: bytes, seconds: float) -> None:
        """Writes a line to the server.

        Raises:
            TimeoutError: it does not read it in time.
            BrokenPipeError: it has ended.
        """
        assert self.process is not None and self.process.stdin is not None
        requests, rest = self.process.stdin.fileno(), memoryview(line)
        # A server that stopped reading would block this process in write().
        os.set_blocking(requests, False)
        poll, deadline = select.poll(), time.monotonic() + seconds
        poll.register(requests, select.POLLOUT)
        while rest:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            rest = rest[os.write(requests, rest[:65_536]) :]

    def _reply(self, seconds: float, longest: int) -> tuple[dict[str, Any], bytes]:
        """The server's next reply and its results; b"" if they are too long.

        Raises:
            TimeoutError: no reply in time.
            EOFError: the server has ended.
        """
        assert self.process is not None and self.process.stdout is not None
        replies, deadline = self.process.stdout.fileno(), time.monotonic() + seconds

        def receive(most: int) -> bytes:
            left = deadline - time.monotonic()
            if left <= 0 or not connection.wait([replies], left):
                raise TimeoutError
            part = os.read(replies, most)
            if not part:
                raise EOFError
            return part

        received = bytearray()
        while b"\n" not in received:
            received += receive(65_536)
        line, _, results = received.partition(b"\n")
        reply = json.loads(line)
        missing = reply.get("length", 0) - len(results)
        while missing > 0:
            part = receive(min(missing, 65_536))
            missing -= len(part)
            # Results that are too long are still read, or the next reply would start inside them.
            if reply["length"] <= longest:
                results += part
        return reply, bytes(results) if reply.get("length", 0) <= longest else b""

    def stop(self) -> None:
        """Kills the server and the program that it runs."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.__exit__(None, None, None)
        self.process = None


class ProgramWorkers(Workers):
    """Program servers that share one queue; a batch has the limits of `Workers.ask`."""

    def __init__(
        self,
        count: int,
        time_limit: float,
        memory_limit_gib: float,
        *,
        allow_unconfined: bool = False,
    ) -> None:
        super().__init__("", count, time_limit, memory_limit_gib)
        self.all = [  # type: ignore[assignment]
            ProgramWorker(time_limit, memory_limit_gib, allow_unconfined) for _ in range(count)
        ]


def python_checker(*, allow_unconfined: bool = False) -> Checker:
    """The verifier `python`; for the argument see `verifiers.get_verifier`."""
    return Checker(
        name="python",
        version=3,
        plainly=_check_program,
        workers=partial(ProgramWorkers, allow_unconfined=allow_unconfined),
        gold_is_answer=False,
        longest=LONGEST_PROGRAM,
        blocks=True,
    )


def _check_program(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    read_tests(gold)
    program = None if answer is None else strip_fence(answer)
    if not program or len(program) > LONGEST_PROGRAM:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    return program, gold
