"""Removes what a grading worker does not need: network, writing files, processes, secrets.

No answer is ever evaluated as code. If a parser were tricked into it, this limits what that code
could do. None of it needs root. Each layer applies where the kernel supports it; `leave_network`
and `confine` return whether it does:

    everywhere      Python ends the worker that opens a file to write, a socket or a process (audit
                    hook); no file grows (RLIMIT_FSIZE), few are open, no core dump, no child
                    process unless root runs it (RLIMIT_NPROC); capabilities are dropped; the
                    environment holds only `ALLOWED_VARIABLES`
    "namespace"     no network interface at all (user and network namespaces; containers often
                    forbid them)
    "landlock"      the kernel denies writing, making, renaming and deleting files, and running
                    programs; from Linux 6.7 TCP as well, from 6.12 signals to other processes

Code that got past Python's hook could still read what the user may read, without a way to send it
anywhere under "namespace". macOS has only the first row.
"""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ALLOWED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
OPEN_FILES = 64
VIOLATION_STATUS = (
    75  # exit status of a process that was ended for what it tried, or for its memory
)
# Of Python's audit events, those by which something would leave the process. Its table is in the
# documentation of `sys.audit`.
REFUSED = (
    "ctypes.", "ftplib.", "http.client.", "imaplib.", "nntplib.", "os.chflags", "os.chmod",
    "os.chown", "os.exec", "os.fork", "os.kill", "os.link", "os.lockf", "os.mkdir",
    "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.setxattr", "os.spawn",
    "os.symlink", "os.system", "os.truncate", "os.unsetenv", "os.utime", "poplib.", "pty.spawn",
    "shutil.", "signal.pthread_kill", "smtplib.", "socket.", "sqlite3.", "subprocess.", "syslog.",
    "telnetlib.", "tempfile.", "urllib.", "webbrowser.",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def allowed_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of the caller's environment that a worker gets, without any token."""
    return {name: variables[name] for name in ALLOWED_VARIABLES if name in variables} | _ONE_THREAD


def leave_network() -> bool:
    """Moves this process, which must have no threads yet, to a network namespace without a way out.

    Returns:
        Whether the kernel allows it.
    """
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    # A user namespace first, because an ordinary user may make a network only inside one.
    clone_newuser, clone_newnet = 0x1000_0000, 0x4000_0000
    return unshare is not None and unshare(clone_newuser | clone_newnet) == 0


def confine(refused: Callable[[str], None]) -> bool:
    """Limits this process for good. Files to write to must be open, and imports done.

    Args:
        refused: called with the name of the audit event before the process is ended for it.

    Returns:
        Whether the kernel denies writing files (Landlock).
    """
    # A .pyc would count as opening a file to write, and end the process.
    sys.dont_write_bytecode = True
    # Pipes are not files to this limit, so replies still get out.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # A core dump would hold golds and land in the user's folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    with contextlib.suppress(ValueError, OSError):  # macOS takes no 0 here
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    # Before the audit hook, which refuses the ctypes calls that Landlock is entered by.
    landlocked = sys.platform == "linux" and _landlock()
    if sys.platform == "linux":
        drop_capabilities()

    end_on_refused_events(refused)
    return landlocked


def end_on_refused_events(refused: Callable[[str], None]) -> None:
    """Makes Python end this process before any event of `REFUSED`, or before it opens a file to
    write. `refused` is called with the event's name first.
    """

    def hook(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
        if writes or event.startswith(REFUSED):
            refused(event)
            os._exit(VIOLATION_STATUS)

    sys.addaudithook(hook)


class _Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`: what is denied unless a rule allows it (no rule does)."""

    _fields_ = [
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _Beneath(ctypes.Structure):
    """`struct landlock_path_beneath_attr`: what is allowed at a path and below it."""

    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def drop_capabilities() -> None:
    """Drops root's rights over other processes and over files of others.

    Without it, root outside its own namespace reads other processes' environments: since Linux
    6.13, CAP_PERFMON is enough for that in spite of Landlock.
    """
    version_3, this_process = 0x2008_0522, 0
    header = (ctypes.c_uint32 * 2)(version_3, this_process)
    none = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, 64 bits each
    ctypes.CDLL(None).capset(header, none)


def _landlock() -> bool:
    """Denies all that Landlock knows except reading; whether the kernel has it."""
    ruleset = landlock_ruleset()
    return ruleset is not None and enter_ruleset(ruleset)


def landlock_ruleset(
    readable: Sequence[str | Path] | None = None, listed: Sequence[str | Path] = ()
) -> int | None:
    """The file descriptor of a Landlock ruleset that denies everything else; None without Landlock.

    Args:
        readable: files and folders, with their contents, that may be read; None allows all reading.
        listed: folders whose names, and those of the folders in them, may be read.
    """
    create_ruleset, add_rule = 444, 445  # system calls, of which the C library has no wrappers
    libc = ctypes.CDLL(None)
    # The flag 1 asks for the version of the interface and makes no ruleset.
    version = libc.syscall(create_ruleset, None, 0, 1)
    if version < 1:
        return None
    # Asking for a right that the kernel does not know fails with EINVAL.
    bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)  # bits 0 to 12, 13, 14, 15
    read_file, read_folder = 1 << 2, 1 << 3
    denied = (1 << bits) - 1
    if readable is None:
        denied &= ~(read_file | read_folder)
    rules = _Ruleset(denied, 3 * (version >= 4), 3 * (version >= 6))
    ruleset = libc.syscall(create_ruleset, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return None
    rights_of = dict.fromkeys(readable or (), read_file | read_folder)
    for path, rights in (rights_of | dict.fromkeys(listed, read_folder)).items():
        with contextlib.suppress(OSError):  # one that is not there
            result = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # The kernel refuses a right of folders on a file.
            rights &= ~0 if os.path.isdir(path) else ~read_folder
            rule = _Beneath(rights, result)
            libc.syscall(add_rule, ruleset, 1, ctypes.byref(rule), 0)
            os.close(result)
    return ruleset


def enter_ruleset(ruleset: int) -> bool:
    """Restricts this process and closes the ruleset; whether the kernel applies it."""
    restrict_self, set_no_new_privileges = 446, 38
    libc = ctypes.CDLL(None)
    # Landlock demands it of a process without CAP_SYS_ADMIN.
    libc.prctl(set_no_new_privileges, 1, 0, 0, 0)
    denied = libc.syscall(restrict_self, ruleset, 0) == 0
    os.close(ruleset)
    return denied
