"""Child processes that train side by side, and end with their parent."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_unsloth.runs.stopping import allow

SAVE_SECONDS = 600.0
"""Seconds for a child to finish its step and save; a second Ctrl-C ends it sooner."""


def start_child(
    words: Sequence[str], log: Path, cache: Path, *, threads: int = 1
) -> subprocess.Popen:
    """Starts `python -m WORDS` in a new session, so that its parent passes Ctrl-C on.

    It must call `end_with_parent`.

    Args:
        log: file for standard output and error, appended to.
        cache: folder for what Unsloth compiles: two processes must not write to one.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {
                "OMP_NUM_THREADS": str(threads),
                "UNSLOTH_COMPILE_LOCATION": str(cache),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            start_new_session=True,
        )


def end_with_parent() -> None:
    """In a child: sends itself SIGTERM once its standard input closes, as its parent has ended."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock Python wants at its end
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def end_children(children: Sequence[subprocess.Popen]) -> None:
    """Interrupts the children; each saves its step, or is killed after `SAVE_SECONDS` seconds."""
    allow(SAVE_SECONDS + 10)
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + SAVE_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        child.kill()


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes for new processes, by the system and the control group; None if unknown.

    Args:
        root: of the file system with `proc` and `sys`.
    """
    results = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        table: Mapping[str, str] = dict(line.split(":", 1) for line in lines if ":" in line)
        results.append(1024 * int(table["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        group = root / "sys/fs/cgroup"
        limit = int((group / "memory.max").read_text())
        inactive = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(inactive["inactive_file"])
        results.append(max(0, limit - used))
    return min(results, default=None)
