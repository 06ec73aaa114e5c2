"""The verifier `python`: a program is right if it passes every test of its gold.

A program runs in a process of its own, confined by the kernel (`program_server`), which is given
the test's input. What it writes is compared here, so nothing that it does to Python changes how,
and what is expected of it is nowhere in its reach.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import connection
from typing import Any

from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.confinement import allowed_environment
from sage_unsloth.grading.extraction import unfenced
from sage_unsloth.grading.program_server import NOT_PYTHON
from sage_unsloth.grading.program_tests import read_tests
from sage_unsloth.grading.worker import LATE, PATIENCE
from sage_unsloth.grading.workers import Workers

LONGEST_PROGRAM = 20_000  # characters
NEEDED = ("files", "network", "processes")
"""What a program must be kept from."""
START_LIMIT, GRACE = 60.0, 20.0  # seconds, for the server to start, and to end what it killed

logger = logging.getLogger(__name__)

_START = (
    "import json, sys; own = sys.path[:]; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_unsloth.grading.program_server import serve; sys.path[:] = own; "
    "serve(float(sys.argv[2]))"
)


class ProgramWorker:
    """Asks one program server, which its first question starts.

    Attributes:
        kept_from: what of `NEEDED` programs are kept from; set by `start`.
    """

    def __init__(self, time_limit: float, memory_limit_gib: float, allow_unconfined: bool) -> None:
        self.time_limit, self.memory_limit_gib = time_limit, memory_limit_gib
        self.allow_unconfined = allow_unconfined
        self.process: subprocess.Popen | None = None
        self.kept_from: tuple[str, ...] = ()

    def start(self) -> None:
        """Starts the server, after the end of the one before.

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
        found = self._reply(START_LIMIT)
        if found is None:
            self.stop()
            raise RuntimeError(
                f"the process that runs programs must start within {START_LIMIT:g} s and "
                f"{self.memory_limit_gib:g} GiB; it did not, and its message is on stderr"
            )
        self.kept_from = tuple(found["kept_from"])
        lacking = [name for name in NEEDED if name not in self.kept_from]
        if not lacking:
            return
        if not self.allow_unconfined:
            self.stop()
            raise ValueError(
                f"programs that a model writes must be kept from {', '.join(NEEDED)}; this system "
                f"does not keep them from {', '.join(lacking)}; take Linux 5.13 or newer with "
                "Landlock and seccomp, or, where nothing on the machine can be lost, "
                "--allow-unconfined (allow_unconfined=True)"
            )
        logger.warning(
            "Programs of the model run without being kept from %s by the kernel, because "
            "allow_unconfined is set.",
            ", ".join(lacking),
        )

    def ask(self, question: tuple[str, str], cpu_limit: float | None = None) -> Any:
        """The grade and the kind of a program against its tests, or `LATE`.

        Args:
            question: the program and its gold.
            cpu_limit: seconds that are enough for most; None for the worker's own limit. Both are
                of time, for all tests together.

        Raises:
            RuntimeError: the server does not start.
        """
        program, gold = question
        tests = read_tests(gold)
        seconds = self.time_limit if cpu_limit is None else PATIENCE * cpu_limit
        deadline = time.monotonic() + min(seconds, self.time_limit)
        for number, request in enumerate(tests.requests):
            reply = self._run(request | {"program": program}, deadline - time.monotonic())
            if reply is None or reply["end"] == "late":
                return LATE
            if reply["status"] == NOT_PYTHON and reply["end"] == "exit" and not reply["output"]:
                return [Grade.UNPARSABLE, Kind.NONE]
            done = reply["end"] == "exit" and reply["status"] == 0
            if not done or not tests.passes(number, reply["output"]):
                return [Grade.WRONG, Kind.TESTS]
        return [Grade.CORRECT, Kind.TESTS]

    def _run(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The server's reply; None if it came to none."""
        if seconds <= 0:
            return None
        if self.process is None or self.process.poll() is not None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        line = memoryview(json.dumps(request | {"seconds": seconds}).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self.process.stdin.fileno(), line) :]
        except BrokenPipeError:
            self.stop()
            return None
        reply = self._reply(seconds + GRACE)
        if reply is None:
            self.stop()
        return reply

    def _reply(self, seconds: float) -> dict[str, Any] | None:
        """The next line of the server; None if there is none in time."""
        assert self.process is not None and self.process.stdout is not None
        replies, deadline, parts = self.process.stdout.fileno(), time.monotonic() + seconds, []
        while not parts or not parts[-1].endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not connection.wait([replies], left):
                return None
            parts.append(os.read(replies, 65_536))
            if not parts[-1]:
                return None
        return json.loads(b"".join(parts))

    def stop(self) -> None:
        """Kills the server; the program that it runs dies with it."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.__exit__(None, None, None)
        self.process = None


class ProgramWorkers(Workers):
    """Program servers behind one queue; a batch that hangs has the limits of `Workers.ask`."""

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
    """The verifier `python`; `verifiers.get_verifier` says what the argument does."""
    return Checker(
        name="python",
        version=1,
        plainly=_check_program,
        workers=partial(ProgramWorkers, allow_unconfined=allow_unconfined),
        gold_is_answer=False,
        longest=LONGEST_PROGRAM,
        blocks=True,
    )


def _check_program(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    read_tests(gold)
    program = None if answer is None else unfenced(answer)
    if not program or len(program) > LONGEST_PROGRAM:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    return program, gold
