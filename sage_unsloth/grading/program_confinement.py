"""Keeps a program from files, network and other processes, and checks that it works."""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from sage_unsloth.grading.confinement import (
    drop_capabilities,
    enter_ruleset,
    landlock_ruleset,
)
from sage_unsloth.grading.seccomp import filter_calls

_SHARED = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_MOUNT = 0x1000_0000, 0x2000_0000, 0x4000_0000, 0x0002_0000
_NEW_HOST_NAME, _NEW_IPC = 0x0400_0000, 0x0800_0000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x4_0000
_READ_ONLY, _NO_SUID, _NO_DEVICES = 1, 2, 4
# Folders over which the server mounts the tree that programs see, in a mount namespace of its own.
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/tmp", "/var/tmp")


def readable_files() -> list[Path]:
    """What a program may read: Python's standard library, without installed packages, and the
    system's shared libraries.
    """
    library = Path(sysconfig.get_path("stdlib"))
    # Installed packages, which may be anything, stay out of reach.
    own = [path for path in library.iterdir() if path.name not in ("site-packages", "test")]
    shared = [path for folder in _SHARED for path in _libraries(Path(folder))]
    return [*own, *shared, *map(Path, _DEVICES)]


def _libraries(path: Path) -> list[Path]:
    """A file, or the shared libraries in a folder, without other packages' files."""
    if path.name == "zoneinfo" or path.is_file():
        return [path]
    return [
        result for folder in (path, *path.glob("*-linux-gnu")) for result in folder.glob("*.so*")
    ]


class Namespaces:
    """The namespaces of a program server, where the kernel grants them.

    Attributes:
        granted: which of "network", "processes" and "names of files" programs have to themselves.
        root: folder with only Python's and the system's libraries, or None.
    """

    def __init__(self) -> None:
        self.granted: list[str] = []
        self.root: str | None = None
        self._own_processes = -1
        self._libc = ctypes.CDLL(None, use_errno=True)

    def enter(self) -> None:
        """Moves this process, which must have no threads, to new namespaces.

        With a namespace of processes, a child returns from here, as its first process; the caller's
        process waits for it and exits with its status.
        """
        if sys.platform != "linux":
            return
        ids = os.getuid(), os.getgid()
        every = _NEW_USER | _NEW_NET | _NEW_PID | _NEW_MOUNT | _NEW_HOST_NAME | _NEW_IPC
        # Some kernels and containers grant a network namespace and no others.
        if self._libc.unshare(every) != 0:
            if self._libc.unshare(_NEW_USER | _NEW_NET) == 0:
                self.granted.append("network")
            return
        self.granted += ["network", "processes"]
        with contextlib.suppress(OSError):  # without a user id, nothing can be mounted
            # The kernel takes no gid_map from an ordinary user before this.
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{ids[0]} {ids[0]} 1")
            _write("/proc/self/gid_map", f"{ids[1]} {ids[1]} 1")
        self._libc.sethostname(b"localhost", 9)
        child = os.fork()
        if child:
            # Or the caller would not see the end of the pipes when the child ends.
            os.closerange(0, 2)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
        kill_with_parent()
        with contextlib.suppress(OSError):
            self._own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._make_root()

    def fork(self) -> int:
        """Forks a child, in its own namespace of processes if possible."""
        own = self._own_processes
        # unshare(NEW_PID) moves the children made from now on, and not the caller.
        nested = own >= 0 and self._libc.unshare(_NEW_PID) == 0
        child = os.fork()
        # Back to the server's own, or its next fork would fail once that first process has ended.
        if child and nested and self._libc.setns(own, _NEW_PID) != 0:
            raise OSError(ctypes.get_errno(), "a program server must return to its own namespace")
        return child

    def _mount(
        self, source: str, target: str, kind: str | None, flags: int, data: str = ""
    ) -> bool:
        arguments = source.encode(), target.encode(), kind and kind.encode(), flags, data.encode()
        return self._libc.mount(*arguments) == 0

    def _make_root(self) -> None:
        """Mounts a tree with only Python's and the system's libraries, for chroot."""
        library = sysconfig.get_path("stdlib")
        needed = [library, *_SHARED, *_DEVICES]
        prefixes = (sys.prefix, sys.base_prefix, *sys.path, *needed)
        point = next((p for p in _MOUNT_POINTS if os.path.isdir(p) and not _holds(p, prefixes)), "")
        # Private, so that no mount of ours shows outside the namespace.
        if not point or not self._mount("none", "/", None, _RECURSIVE | _PRIVATE):
            return
        if not self._mount("tmpfs", point, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755"):
            return
        mounted: list[str] = []
        # Outer folders first: a mount over one hides what was mounted inside it.
        for path in sorted(needed, key=len):
            if not os.path.exists(path) or _holds_any(mounted, path):
                continue
            target = point + path
            try:
                os.makedirs(
                    target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True
                )
                if not os.path.isdir(path):
                    open(target, "a").close()
            except OSError:
                return
            if not self._mount(os.path.realpath(path), target, None, _BIND | _RECURSIVE):
                return
            mounted.append(path)
        installed = f"{point}{library}/site-packages"
        if os.path.isdir(installed) and not self._mount("tmpfs", installed, "tmpfs", _READ_ONLY):
            return
        self.root = point
        self.granted.append("names of files")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _holds(folder: str, paths: tuple[str, ...]) -> bool:
    return any(f"{os.path.realpath(path)}/".startswith(f"{folder}/") for path in paths)


def _holds_any(folders: list[str], path: str) -> bool:
    return any(_holds(folder, (path,)) or path.startswith(f"{folder}/") for folder in folders)


def kill_with_parent() -> None:
    """The kernel kills this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


class Confinement:
    """Confines a child before it runs a program; `memory_limit` in bytes of address space."""

    def __init__(self, memory_limit: int, namespaces: Namespaces) -> None:
        self.memory_limit, self.namespaces = memory_limit, namespaces
        self.ruleset = None
        if sys.platform == "linux":
            self.ruleset = landlock_ruleset(readable_files(), [sysconfig.get_path("stdlib")])

    def enter(self, seconds: float) -> None:
        """Confines this process for good, with the layers that the kernel has."""
        kill_with_parent()
        # Whole seconds, two to spare: the server ends it on time, and this holds if the server
        # dies.
        cpu = int(time.process_time() + seconds) + 2
        limits = {
            "AS": self.memory_limit, "CPU": cpu, "FSIZE": 0, "CORE": 0, "NOFILE": 32,
            "MEMLOCK": 0, "MSGQUEUE": 0, "NICE": 0, "RTPRIO": 0, "SIGPENDING": 64,
        }  # fmt: skip
        for name, value in limits.items():
            try:
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
            except (AttributeError, ValueError, OSError):  # macOS has some of them only
                if sys.platform == "linux":
                    raise
        if sys.platform == "linux":
            if self.namespaces.root is not None:
                # Before capabilities are dropped, of which chroot needs one.
                os.chroot(self.namespaces.root)
            os.chdir("/")
            drop_capabilities()
            if self.ruleset is not None:
                enter_ruleset(self.ruleset)
            # Last, because it refuses the calls by which the other layers are set up.
            filter_calls()


def server_settings() -> list:
    """Settings of this process that a program might change from outside: limits, affinity, priority
    and scheduling.
    """
    limits = [
        getattr(resource, name) for name in sorted(vars(resource)) if name.startswith("RLIMIT_")
    ]
    settings: list = [resource.getrlimit(limit) for limit in limits]
    settings.append(os.getpriority(os.PRIO_PROCESS, 0))
    if sys.platform == "linux":
        get_io_priority = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
        settings += [os.sched_getaffinity(0), os.sched_getscheduler(0)]
        settings.append(os.sched_getparam(0).sched_priority)
        if get_io_priority is not None:
            settings.append(ctypes.CDLL(None).syscall(get_io_priority, 1, 0))
    return settings


def denied_access(confinement: Confinement) -> list[str]:
    """What a confined child fails to do when it tries: of "files", "network", "processes",
    "limits".
    """
    reading, writing = os.pipe()
    child = confinement.namespaces.fork()
    if child == 0:
        try:
            confinement.enter(5)
            os.write(writing, json.dumps(_denied()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
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

    # These set what is set already: only whether the call is allowed matters. Each could name any
    # process of the same user.
    def sets_limits() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))

    def sets_priority() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))

    def sets_processors() -> None:
        os.sched_setaffinity(0, os.sched_getaffinity(0))

    def is_denied(action: Callable[[], None]) -> bool:
        try:
            action()
        except (OSError, ValueError):  # of limits, a refusal is a ValueError
            return True
        return False

    tries = {
        "files": (reads,),
        "network": (connects,),
        "processes": (forks,),
        "limits": (sets_limits, sets_priority, sets_processors),
    }
    return [name for name, actions in tries.items() if all(map(is_denied, actions))]
