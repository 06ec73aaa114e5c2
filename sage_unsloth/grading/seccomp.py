"""A filter on system calls, which the Linux kernel applies to a process for good (seccomp).

What a program that computes has no use for is refused: processes (threads are allowed), sockets,
files to write, signals to others, reading other processes, namespaces and mounts. It needs no root
and no namespace; x86-64 and aarch64. Numbers are those of the kernel's tables
(`arch/x86/entry/syscalls/syscall_64.tbl`, `scripts/syscall.tbl`).
"""

import ctypes
import errno
import os
import platform
import re
import sys

_KILL, _ALLOW, _ERROR = 0x8000_0000, 0x7FFF_0000, 0x0005_0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = 0o20000000
_CLONE_THREAD = 0x1_0000
_X32 = 0x4000_0000  # a second set of numbers on x86-64

# name:number on x86-64:number on aarch64
REFUSED_CALLS = """
    # processes
    fork:57:- vfork:58:- execve:59:221 execveat:322:281 ptrace:101:117 process_vm_readv:310:270
    process_vm_writev:311:271 kcmp:312:272 pidfd_open:434:434 pidfd_getfd:438:438
    process_madvise:440:440 setpgid:109:154 setsid:112:157 prctl:157:167 personality:135:92
    unshare:272:97 setns:308:268 seccomp:317:277
    # signals
    kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240
    pidfd_send_signal:424:424
    # network
    socket:41:198 socketpair:53:199 connect:42:203 accept:43:202 accept4:288:242 bind:49:200
    listen:50:201 sendto:44:206 sendmsg:46:211 sendmmsg:307:269
    # files
    creat:85:- rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34
    rmdir:84:- link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36
    mknod:133:- mknodat:259:33 chmod:90:- fchmod:91:52 fchmodat:268:53 chown:92:- lchown:94:-
    fchown:93:55 fchownat:260:54 truncate:76:45 ftruncate:77:46 fallocate:285:47 setxattr:188:5
    lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
    utime:132:- utimes:235:- futimesat:261:- utimensat:280:88 memfd_create:319:279
    name_to_handle_at:303:264 open_by_handle_at:304:265 fchmodat2:452:452 setxattrat:463:463
    removexattrat:466:466
    # memory shared with others
    shmget:29:194 shmat:30:196 shmctl:31:195 msgget:68:186 msgsnd:69:189 msgrcv:70:188
    msgctl:71:187 semget:64:190 semop:65:193 semctl:66:191 semtimedop:220:192 mq_open:240:180
    mq_unlink:241:181 mq_timedsend:242:182 mq_timedreceive:243:183 mq_notify:244:184
    # kernel
    mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 move_mount:429:429
    open_tree:428:428 fsopen:430:430 fsconfig:431:431 fsmount:432:432 fspick:433:433
    mount_setattr:442:442 quotactl:179:60 swapon:167:224 swapoff:168:225 reboot:169:142
    sethostname:170:161 setdomainname:171:162 init_module:175:105 finit_module:313:273
    delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 bpf:321:280
    perf_event_open:298:241 userfaultfd:323:282 add_key:248:217 request_key:249:218
    keyctl:250:219 io_setup:206:0 io_submit:209:2 io_uring_setup:425:425 io_uring_enter:426:426
    io_uring_register:427:427 acct:163:89 syslog:103:116 settimeofday:164:170
    clock_settime:227:112 adjtimex:159:171 clock_adjtime:305:266 iopl:172:- ioperm:173:-
    vhangup:153:58
"""
# open flags are the second argument of `open`, the third of `openat`; clone's are its first.
_TABLES = {
    "x86_64": {"architecture": 0xC000_003E, "open": 2, "openat": 257, "clone": 56},
    "aarch64": {"architecture": 0xC000_00B7, "open": None, "openat": 56, "clone": 220},
}
_FROM_MEMORY = (435, 437)  # clone3 and openat2, whose flags a filter cannot see


def refused_calls(machine: str) -> list[int]:
    """The numbers of `REFUSED_CALLS`."""
    column = 1 + list(_TABLES).index(machine)
    words = [word.split(":") for word in re.sub("#.*", "", REFUSED_CALLS).split()]
    return [int(word[column]) for word in words if word[column] != "-"]


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def filter_instructions(machine: str, without: tuple[int, ...] = ()) -> bytes | None:
    """The filter as `struct sock_filter`s; None for another machine than the two.

    Args:
        machine: as `platform.machine()` names it.
        without: further system calls that are refused as ones that the kernel does not have.
    """
    table = _TABLES.get(machine)
    if table is None:
        return None
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, table["architecture"]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    for number in (*_FROM_MEMORY, *without):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    for number in refused_calls(machine):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    writing = _WRITING | _TMPFILE
    for name, argument in (("open", 1), ("openat", 2)):
        if table[name] is not None:
            lines += [
                (_EQUAL, 0, 4, table[name]),
                (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
                (_ANY_BIT, 0, 1, writing),
                (_RETURN, 0, 0, _ERROR | errno.EACCES),
                (_RETURN, 0, 0, _ALLOW),
            ]
    lines += [
        (_EQUAL, 0, 4, table["clone"]),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(
        code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for code, yes, no, value in lines
    )


def filter_calls(without: tuple[int, ...] = ()) -> bool:
    """Applies the filter to this thread, and to all that it starts; whether the kernel does so."""
    if sys.platform != "linux":
        return False
    instructions = filter_instructions(platform.machine(), without)
    if instructions is None:
        return False
    set_no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(memory))
    prctl = ctypes.CDLL(None).prctl
    prctl(set_no_new_privileges, 1, 0, 0, 0)
    return prctl(set_seccomp, ctypes.c_ulong(by_filter), ctypes.byref(program), 0, 0) == 0
