"""What keeps a program from files, network and other processes, and how it is seen that it does."""

import ctypes
import json
import os
import resource
import signal
import sys
import sysconfig
import time
from pathlib import Path

from sage_unsloth.grading.confinement import (
    drop_capabilities,
    enter_ruleset,
    landlock_ruleset,
)
from sage_unsloth.grading.seccomp import filter_calls

_SHARED = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def readable_files() -> list[Path]:
    """What a program may read: Python's library without what is installed beside it, and the
    system's shared libraries.
    """
    library = Path(sysconfig.get_path("stdlib"))
    own = [path for path in library.iterdir() if path.name not in ("site-packages", "test")]
    shared = [path for folder in _SHARED for path in _libraries(Path(folder))]
    return [*own, *shared, *map(Path, _DEVICES)]


def _libraries(path: Path) -> list[Path]:
    """A file, or the shared libraries in a folder; other packages' files may lie beside them."""
    if path.name == "zoneinfo" or path.is_file():
        return [path]
    return [found for folder in (path, *path.glob("*-linux-gnu")) for found in folder.glob("*.so*")]


class Confinement:
    """What a child does before it runs a program; `memory_limit` in bytes of address space."""

    def __init__(self, memory_limit: int) -> None:
        self.memory_limit = memory_limit
        self.ruleset = None
        if sys.platform == "linux":
            self.ruleset = landlock_ruleset(readable_files(), [sysconfig.get_path("stdlib")])

    def enter(self, seconds: float) -> None:
        """Confines this process for good; layers that the kernel lacks are left out."""
        if sys.platform == "linux":
            end_with_parent = 1
            ctypes.CDLL(None).prctl(end_with_parent, signal.SIGKILL, 0, 0, 0)
        cpu = int(time.process_time() + seconds) + 2
        for limit, value in (
            (resource.RLIMIT_AS, self.memory_limit),
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 32),
        ):
            try:
                resource.setrlimit(limit, (value, value))
            except (ValueError, OSError):
                if sys.platform == "linux":
                    raise
        if sys.platform == "linux":
            drop_capabilities()
            if self.ruleset is not None:
                enter_ruleset(self.ruleset)
            filter_calls()


def kept_from(confinement: Confinement) -> list[str]:
    """What a confined child cannot do, as one finds that tries: "files", "network", "processes"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            confinement.enter(5)
            os.write(writing, json.dumps(_denied()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as found:
        text = found.read()
    os.waitpid(child, 0)
    return json.loads(text or "[]")


def _denied() -> list[str]:
    import socket

    def reads() -> None:
        os.close(os.open(__file__, os.O_RDONLY))

    def connects() -> None:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()

    def forks() -> None:
        if os.fork() == 0:
            os._exit(0)

    denied = []
    for name, tries in (("files", reads), ("network", connects), ("processes", forks)):
        try:
            tries()
        except OSError:
            denied.append(name)
    return denied
