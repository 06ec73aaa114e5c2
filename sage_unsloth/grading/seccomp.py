"""A filter on system calls, which the Linux kernel applies to a process for good (seccomp).

The filter lists the calls that a computing Python program needs. Every other call fails with
ENOSYS, as if the kernel did not have it, so that the C library uses its fallback. That excludes
processes (threads are allowed), signals to others, sockets, writing files, limits, affinity and
priority of any process, namespaces, and every call that a later kernel adds. It needs neither root
nor a namespace. The numbers are from the kernel's tables (`arch/x86/entry/syscalls/syscall_64.tbl`,
`scripts/syscall.tbl`).
"""

import ctypes
import errno
import os
import platform
import re
import sys

_KILL, _ALLOW, _ERROR = 0x8000_0000, 0x7FFF_0000, 0x0005_0000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
_TMPFILE = 0o20000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _TMPFILE
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_CLONE_THREAD, _CLONE_NEW = 0x1_0000, 0x7E02_0000
_RLIMIT_STACK = 3
# Copies and flags of a descriptor. Left out: F_SETOWN and F_SETSIG, which make the kernel send any
# signal to any process of the user, locks, leases, and the size of a pipe.
_DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD to F_SETFL, F_DUPFD_CLOEXEC
# What opening and reading ask of a descriptor: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX,
# FIOCLEX.
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

# name:number on x86-64:number on aarch64
ALLOWED_CALLS = """
    # open files
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69
    pwritev:296:70 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33:- dup3:292:24
    pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72
    # names of files; Landlock decides what may be read
    stat:4:- lstat:6:- fstat:5:80 newfstatat:262:79 statx:332:291 access:21:- faccessat:269:48
    faccessat2:439:439 readlink:89:- readlinkat:267:78 getcwd:79:17 getdents:78:- getdents64:217:61
    # memory
    munmap:11:215 mremap:25:216 madvise:28:233 brk:12:214
    # threads
    futex:202:98 exit:60:93 exit_group:231:94 gettid:186:178 getpid:39:172 getppid:110:173
    sched_yield:24:124 set_robust_list:273:99 rseq:334:293 set_tid_address:218:96
    # signals and timers of its own
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 sigaltstack:131:132
    restart_syscall:219:128 setitimer:38:103 getitimer:36:102 alarm:37:-
    # time
    clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101
    gettimeofday:96:169 time:201:- times:100:153 getrusage:98:165
    # who and where it is
    getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 uname:63:160 getrandom:318:278
    getrlimit:97:163
"""
# Allowed for some arguments only: `_conditions`.
CONDITIONAL_CALLS = """
    open:2:- openat:257:56 clone:56:220 mmap:9:222 mprotect:10:226 fcntl:72:25 ioctl:16:29
    prlimit64:302:261 sched_getaffinity:204:123
"""
_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

_Line = tuple[int, int, int, int]  # an instruction: code, jump if true, jump if false, value


def call_numbers(table: str, machine: str) -> dict[str, int]:
    """Numbers of system calls by name, from one of the two tables."""
    column = 1 + list(_ARCHITECTURES).index(machine)
    words = [word.split(":") for word in re.sub("#.*", "", table).split()]
    return {word[0]: int(word[column]) for word in words if word[column] != "-"}


def _load(argument: int, *, high: bool = False) -> _Line:
    """Loads half of a 64-bit argument; both machines are little-endian."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4 * high)


def _refuse(error: int) -> _Line:
    return (_RETURN, 0, 0, _ERROR | error)


_PASS: _Line = (_RETURN, 0, 0, _ALLOW)
_DENY = _refuse(errno.EPERM)


def _one_of(argument: int, values: tuple[int, ...], error: int) -> list[_Line]:
    # A jump skips the comparisons that are left and the refusal behind them.
    compared = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_load(argument), *compared, _refuse(error), _PASS]


def _conditions() -> dict[str, list[_Line]]:
    """Instructions that decide about the calls of `CONDITIONAL_CALLS`."""

    def load_argument(argument: int) -> list[_Line]:
        return [_load(argument), (_ANY_BIT, 0, 1, _WRITING), _refuse(errno.EACCES), _PASS]

    return {
        "open": load_argument(1),
        "openat": load_argument(2),
        "clone": [
            *(_load(0), (_ANY_BIT, 2, 0, _CLONE_NEW), (_ANY_BIT, 0, 1, _CLONE_THREAD)),
            *(_PASS, _DENY),
        ],
        # No memory is both written and executed: code comes from files only.
        "mmap": [
            *(_load(2), (_ANY_BIT, 0, 4, _PROT_EXEC), (_ANY_BIT, 2, 0, _PROT_WRITE)),
            *(_load(3), (_ANY_BIT, 0, 1, _MAP_ANONYMOUS), _DENY, _PASS),
        ],
        "mprotect": [_load(2), (_ANY_BIT, 0, 1, _PROT_EXEC), _DENY, _PASS],
        "fcntl": _one_of(1, _DESCRIPTOR_COMMANDS, errno.EPERM),
        "ioctl": _one_of(1, _DEVICE_COMMANDS, errno.ENOTTY),
        # Its own limits may be read; of them only the stack's may be set, as deep recursions do.
        "prlimit64": [
            *(_load(0), (_EQUAL, 0, 6, 0), _load(1), (_EQUAL, 5, 0, _RLIMIT_STACK)),
            *(_load(2), (_EQUAL, 0, 2, 0), _load(2, high=True), (_EQUAL, 1, 0, 0)),
            *(_DENY, _PASS),
        ],
        "sched_getaffinity": _one_of(0, (0,), errno.EPERM),
    }


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def filter_instructions(machine: str) -> bytes | None:
    """The filter as `struct sock_filter`s; None for an unsupported machine.

    Args:
        machine: as in `platform.machine()`.
    """
    if machine not in _ARCHITECTURES:
        return None
    lines: list[_Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        # 32-bit calls have other numbers on the same machine, so they are not compared but killed.
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in call_numbers(ALLOWED_CALLS, machine).values():
        lines += [(_EQUAL, 0, 1, number), _PASS]
    conditions = _conditions()
    for name, number in call_numbers(CONDITIONAL_CALLS, machine).items():
        lines += [(_EQUAL, 0, len(conditions[name]), number), *conditions[name]]
    lines.append(_refuse(errno.ENOSYS))
    return b"".join(
        code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for code, yes, no, value in lines
    )


def filter_calls() -> bool:
    """Applies the filter to this thread and those it starts; whether the kernel accepts it."""
    if sys.platform != "linux":
        return False
    instructions = filter_instructions(platform.machine())
    if instructions is None:
        return False
    set_no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(memory))
    prctl = ctypes.CDLL(None).prctl
    prctl(set_no_new_privileges, 1, 0, 0, 0)
    return prctl(set_seccomp, ctypes.c_ulong(by_filter), ctypes.byref(program), 0, 0) == 0
