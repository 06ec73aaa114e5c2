"""Programs that attack the verifier `python`, as two kinds of user on two kinds of kernel.

`hostile_runner` runs them; each would be right, or change something, if it got at what it is after.
"""

import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from functools import lru_cache
from pathlib import Path

import pytest

from sage_unsloth.grading import (
    program_confinement,
    program_server,
    program_tests,
    programs,
    seccomp,
)
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.program_tests import read_tests
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.runs.files import read_jsonl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("hostile_runner.py")
HOSTILE = read_jsonl(ROOT / "data/hostile_programs.jsonl")
ADD = json.dumps(["assert add(2, 3) == 5"])
HONEST = "def add(a, b):\n    return a + b"
# The rest attacks Python and its limits of time and memory, which no user and no kernel changes.
OF_THE_KERNEL = (
    "audit hook", "ctypes", "descriptors", "fork bomb", "limits", "machine code", "names of files",
    "native calls", "native control", "proc", "processes", "reading the tests", "scheduling",
    "signals", "signals by descriptor", "sockets", "thread bomb", "threads", "writing files",
)  # fmt: skip
KERNELS = {
    "as it is": ([], ()),
    "ordinary user": (["--user"], OF_THE_KERNEL),
    "no namespaces": (["--no-namespaces"], OF_THE_KERNEL),
    "ordinary user, no namespaces": (["--user", "--no-namespaces"], OF_THE_KERNEL),
    "no Landlock": (["--no-landlock"], ("names of files", "proc", "reading the tests")),
}


def run_hostile(*arguments):
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--seconds", "0.5", *arguments],
        **dict(capture_output=True, text=True, timeout=300),
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_list_of_attacks_has_every_class():
    assert {row["class"] for row in HOSTILE} >= {
        "fork bomb", "endless output", "huge output", "writing files", "sockets", "ctypes",
        "reading the tests", "sys.exit", "os._exit", "builtins", "__eq__", "proc", "threads",
        "signals", "recursion", "memory", "results", "processes", "time", "limits", "scheduling",
        "native calls", "signals by descriptor", "machine code", "audit hook", "names of files",
        "descriptors", "thread bomb", "slow writer", "stdin tricks", "timers", "forged results",
    }  # fmt: skip
    assert len({row["id"] for row in HOSTILE}) == len(HOSTILE)
    assert len({(row["program"], row["tests"]) for row in HOSTILE}) == len(HOSTILE)


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "as it is")) for name in KERNELS],
)
def test_no_hostile_program_is_right_or_changes_anything(kernel):
    arguments, classes = KERNELS[kernel]
    first, *results = run_hostile(*arguments, *classes)
    if "skip" in first:
        pytest.skip(first["skip"])
    if "refused" in first:
        pytest.skip("this kernel cannot confine programs, and they are refused")
    rows = [row for row in HOSTILE if not classes or row["class"] in classes]
    tests = {row["id"]: row["tests"] for row in rows}
    assert [result["id"] for result in results] == list(tests), "the runner came to its end"
    if "no namespaces" in kernel:
        assert first["namespaces"] == []
    right = {result["id"] for result in results if result["grade"] == Grade.CORRECT}
    if "native-control-1" in tests.keys() - right:  # another C library, or other numbers of calls
        assert platform.machine() != "x86_64", "the native calls reach the kernel"
    right -= {"native-control-1"}
    if "names of files" not in first["namespaces"]:  # the page says what a program sees there
        right -= {name for name in right if tests[name] == "names"}
    assert right == set()
    assert [result["id"] for result in results if result["changed"]] == []
    assert [result["id"] for result in results if not result["honest"]] == []
    assert max(result["seconds"] for result in results) < 20


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture
def grader():
    with Grader(time_limit=20.0, checker=get_verifier("python")) as grader:
        grader.check_workers()
        yield grader


def judge(grader, program, gold=ADD):
    return grader.judge_answers([program], [gold])[0].grade


def children(pid):
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def server_of(worker):
    """The process that forks programs: in a namespace of its own it is a child of the first."""
    return ([worker.process.pid, *children(worker.process.pid)])[-1]


def limit(kind, value):
    return lambda pid: resource.prlimit(pid, kind, (value, resource.prlimit(pid, kind)[1]))


@pytest.mark.parametrize(
    "change",
    [
        limit(resource.RLIMIT_CPU, 30),
        limit(resource.RLIMIT_NOFILE, 8),
        limit(resource.RLIMIT_AS, 2**24),
        limit(resource.RLIMIT_FSIZE, 2**20),
        lambda pid: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}),
        lambda pid: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + 1),
        lambda pid: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
        lambda pid: os.kill(pid, signal.SIGKILL),
    ],
    ids=["CPU", "NOFILE", "AS", "FSIZE", "processors", "priority", "scheduler", "killed"],
)
def test_a_server_that_something_changed_is_replaced_and_asked_again(grader, change, request):
    """As a program would change it on a kernel that does not refuse the call."""
    if request.node.callspec.id == "processors" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one processor")
    (worker,) = grader._workers.all
    first = server_of(worker)
    change(first)
    assert judge(grader, HONEST) is Grade.CORRECT
    assert server_of(worker) != first
    assert judge(grader, HONEST + "  # again") is Grade.CORRECT


def test_a_server_that_dies_under_a_program_is_replaced_and_asked_again(grader):
    (worker,) = grader._workers.all
    first = server_of(worker)
    killer = threading.Timer(0.4, os.kill, (first, signal.SIGKILL))
    killer.start()
    assert judge(grader, "import time\ntime.sleep(0.8)\n" + HONEST) is Grade.CORRECT
    assert server_of(worker) != first


def test_a_server_that_is_changed_under_every_program_gives_no_grade(grader, monkeypatch):
    (worker,) = grader._workers.all
    started = worker.start

    def start_and_change():
        started()
        os.setpriority(os.PRIO_PROCESS, server_of(worker), 15)

    monkeypatch.setattr(worker, "start", start_and_change)
    worker.stop()
    assert judge(grader, HONEST) is Grade.TIMED_OUT
    assert worker.replaced == 2
    monkeypatch.undo()
    assert judge(grader, HONEST + "  # again") is Grade.CORRECT


def test_a_server_that_stands_still_holds_up_no_caller(grader, monkeypatch):
    (worker,) = grader._workers.all
    monkeypatch.setattr(programs, "GRACE", 0.2)
    worker.time_limit = 0.5
    os.kill(server_of(worker), signal.SIGSTOP)
    started = time.monotonic()
    long = json.dumps({"inputs": ["x" * 10**6], "outputs": ["1"]})  # more than a pipe holds
    assert judge(grader, "print(1)", long) is Grade.TIMED_OUT
    assert time.monotonic() - started < 10
    worker.time_limit = 20.0
    assert judge(grader, HONEST) is Grade.CORRECT


def test_limits_are_on_a_program_before_its_first_instruction(grader):
    program = """
        import resource
        limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in (
            "AS", "FSIZE", "CORE", "NOFILE", "MEMLOCK", "SIGPENDING")}
        print(limits, resource.getrlimit(resource.RLIMIT_CPU)[1] <= 30)
    """
    expected = {
        "AS": (2**30, 2**30), "FSIZE": (0, 0), "CORE": (0, 0), "NOFILE": (32, 32),
        "MEMLOCK": (0, 0), "SIGPENDING": (64, 64),
    }  # fmt: skip
    gold = json.dumps({"inputs": [""], "outputs": [f"{expected} True"]})
    assert judge(grader, textwrap.dedent(program), gold) is Grade.CORRECT


def test_a_program_of_many_threads_is_killed_and_one_of_a_few_is_not(grader):
    program = (
        "import threading, time\nthreading.stack_size(65536)\n"
        "for _ in range({}):\n    threading.Thread(target=time.sleep, args=({},)).start()\n"
        "print(1)"
    )
    gold = json.dumps({"inputs": [""], "outputs": ["1"]})
    assert judge(grader, program.format(100, 0.2), gold) is Grade.CORRECT
    # Long enough that all 160 are there at once on a busy machine too.
    assert judge(grader, program.format(160, 8), gold) is Grade.WRONG


def test_no_program_outlives_its_grader():
    with Grader(time_limit=0.5, checker=get_verifier("python")) as grader:
        grader.check_workers()
        program = "import time\nwhile True:\n    time.sleep(9)"
        assert judge(grader, program) is Grade.TIMED_OUT
        (worker,) = grader._workers.all
        server, processes = server_of(worker), {worker.process.pid, server_of(worker)}
        assert children(server) == []
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- what a result costs the caller ---------------------------------------------------------------

LONGEST = program_tests.LONGEST_RESULTS
MULTIPLES = range(2**61 - 1, 2**61 * 3_000, 2**61 - 1)


def fill(start, item, end, longest=LONGEST):
    """The longest result of its form: `item` as often as it fits in."""
    room = longest - len(start) - len(end) - 1
    parts, length = [], 0
    for number in range(longest):
        part = item(number) if callable(item) else item
        length += len(part) + 1
        if length > room:
            break
        parts.append(part)
    return (start + ",".join(parts) + end).encode()


@pytest.mark.parametrize(
    "gold, results",
    [
        ("assert f(1) == {1}", fill('{"set":[', lambda i: str(MULTIPLES[i]), "]}")),
        ("assert f(1) == {1}", fill('{"set":[', str, "]}")),
        ("assert set(f(1)) == {1}", fill("[", lambda i: str(MULTIPLES[i]), "]")),
        ("assert f(1) == {1}", fill('{"set":[', lambda i: f"{2**61 * (i + 1)}.0", "]}")),
        ("assert f(1) == {1: 1}", fill('{"dict":[', lambda i: f"[{MULTIPLES[i]},0]", "]}")),
        ("assert f(1) == {1}", fill('{"set":[', lambda i: f'{{"tuple":[{i}]}}', "]}")),
        ("assert f(1) == {1}", fill('{"set":[', "1e300", "]}")),
        ("assert f(1) == {1}", fill('{"set":[', lambda i: f"{i}e290", "]}")),
        ("assert f(1) == [1]", fill("[", "[]", "]")),
        ("assert f(1) == [1]", fill("[", '{"tuple":[]}', "]")),
        ("assert f(1) == [1]", fill("[", '{"set":[]}', "]")),
        ("assert f(1) == [1]", fill("[", '{"dict":[]}', "]")),
        ("assert f(1) == [1]", fill("[", '{"dict":[[1,1]]}', "]")),
        ("assert str(f(1)) == ''", b'"' + b"\x7f" * (LONGEST - 2) + b'"'),
        ("assert str([f(1)]) == ''", fill('"', "\\\\ud83d\\\\ude00".replace("\\\\", "\\"), '"')),
        ("assert sorted(f(1)) == []", fill("[", lambda i: "[" + "0.5," * 250 + f"{i % 7}]", "]")),
        ("assert sorted(f(1)) == []", fill("[", lambda i: f"[[[{i % 7}.5]]]", "]")),
        ("assert sorted(f(1)) == []", fill("[", lambda i: str((i * 7919) % 65_536), "]")),
        ("assert sum(f(1)) == 0", fill("[", lambda i: "9" * 4_000, "]")),
        ("assert f(1) * f(1) == 0", b"9" * 4_299),
        ("assert f(1) % 7 == 9", b"9" * 4_299),
        ("assert str(f(1)) == ''", fill("[", lambda i: "9" * 4_299, "]")),
        ("assert f(1) == {1}", b'{"set":[' * 20 + fill("", str, "")[:60_000] + b"1" + b"]}" * 20),
        ("assert f(1) in f(1)", fill("[", "0.5", "]")),
        ("assert f(1) == 1", b"[" * 900 + b"]" * 900),
        ("assert f(1) == 1", b"1\n" * (LONGEST // 2)),
    ],
)
def test_no_result_costs_its_caller_much(gold, results):
    """What the server lets through, at its longest: 50 ms and 10 MB, of which a busy machine is
    allowed three times as much time."""
    assert program_server._are_results(results)
    tests = read_tests(json.dumps([gold]))
    assert len(results) <= tests.longest_results
    tests.passes(0, "", results)
    used = []
    for _ in range(3):
        started = time.thread_time()
        assert not tests.passes(0, "", results)
        used.append(time.thread_time() - started)
    tracemalloc.start()
    tests.passes(0, "", results)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert min(used) < 0.15
    assert peak < 10_000_000


def test_longer_results_are_not_read(grader):
    long = "def f(n):\n    return list(range(n))"
    assert judge(grader, long, json.dumps(["assert len(f(9_000)) == 9_000"])) is Grade.CORRECT
    assert judge(grader, long, json.dumps(["assert len(f(90_000)) == 90_000"])) is Grade.WRONG
    gold = json.dumps({"inputs": [[30_000]], "outputs": [list(range(30_000))], "fn_name": "f"})
    assert judge(grader, long, gold) is Grade.CORRECT, "a long gold allows a long result"


@pytest.mark.parametrize(
    "output",
    [b"[" * 60_000, b"9" * 5_000, b"0." + b"1" * 60, b"\xff", b'"\xc3\xa4"', b"{", b"1\nx\n"],
)
def test_the_server_lets_no_other_results_through(output):
    assert not program_server._are_results(output)
    assert program_server._are_results(b'[1,2.5,"a"]\nnull\n{"tuple":[1]}\nNaN\n')


# --- the filter of system calls -------------------------------------------------------------------

ENOSYS, EPERM, EACCES, ENOTTY = 0x50026, 0x50001, 0x5000D, 0x50019
ALLOW, KILL = 0x7FFF0000, 0x80000000


@lru_cache
def filter_lines(machine):
    code = seccomp.filter_instructions(machine)
    return [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]


def verdict(machine, number, arguments=(), architecture=None):
    """What the filter says of a call: its instructions are run as the kernel runs them."""
    lines = filter_lines(machine)
    words = [*arguments, *[0] * (6 - len(arguments))]
    architecture = architecture or {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    call = struct.pack("<iIQ6Q", number, architecture, 0, *(word & 2**64 - 1 for word in words))
    at = value = 0
    while True:
        operation, yes, no, constant = lines[at]
        at += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            (value,) = struct.unpack_from("<I", call, constant)
        else:
            holds = value == constant if operation == 0x15 else bool(value & constant)
            at += yes if holds else no


def numbers(machine, *tables):
    tables = tables or (seccomp.ALLOWED_CALLS, seccomp.CONDITIONAL_CALLS)
    return {k: v for table in tables for k, v in seccomp.call_numbers(table, machine).items()}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_that_is_not_listed_is_refused(machine):
    allowed = set(numbers(machine, seccomp.ALLOWED_CALLS).values())
    listed = set(numbers(machine).values())
    assert len(listed) == len(numbers(machine))
    for number in (*range(1_100), *range(0x40000000, 0x40000300), -1):
        if number not in listed:
            assert verdict(machine, number, [1, 1, 1]) == ENOSYS, number
        elif number in allowed:
            assert verdict(machine, number, [2**64 - 1] * 6) == ALLOW, number
    assert verdict(machine, 1, architecture=0x40000003) == KILL  # the calls of 32 bits
    assert seccomp.filter_instructions("riscv64") is None


# name:number on x86-64:number on aarch64, as the headers have them
DANGEROUS = """
    setrlimit:160:164 sched_setparam:142:118 sched_setscheduler:144:119 sched_setaffinity:203:122
    sched_setattr:314:274 setpriority:141:140 ioprio_set:251:30 memfd_secret:447:447
    memfd_create:319:279 inotify_init1:294:26 vmsplice:278:75 splice:275:76 tee:276:77 fork:57:-
    execve:59:221 kill:62:129 tgkill:234:131 ptrace:101:117 socket:41:198 unlinkat:263:35
    mount:165:40 unshare:272:97 setns:308:268 prctl:157:167 bpf:321:280 io_uring_setup:425:425
    pidfd_open:434:434 process_vm_writev:311:271 userfaultfd:323:282 perf_event_open:298:241
    chdir:80:49 chroot:161:51 keyctl:250:219 shmget:29:194 clone3:435:435 openat2:437:437
    timer_create:222:107 flock:73:32 mlockall:151:230 syslog:103:116 ioprio_get:252:31
"""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_reaches_others_is_not_listed(machine):
    for name, number in seccomp.call_numbers(DANGEROUS, machine).items():
        assert name not in numbers(machine) and verdict(machine, number) == ENOSYS, name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    "name, arguments, expected",
    [
        ("openat", (-100, 1, os.O_RDONLY | os.O_CLOEXEC), ALLOW),
        *[
            ("openat", (-100, 1, flag), EACCES)
            for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, 0o20000000)
        ],
        ("clone", (0x3D0F00,), ALLOW),  # a thread, as glibc makes it
        ("clone", (17,), EPERM),  # a fork
        ("clone", (0x4100,), EPERM),  # vfork
        *[("clone", (0x10000 | 1 << bit,), EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)],
        ("mmap", (0, 4096, 3, 0x22), ALLOW),
        ("mmap", (0, 4096, 5, 0x02), ALLOW),  # a library's code
        ("mmap", (0, 4096, 5, 0x22), EPERM),
        ("mmap", (0, 4096, 7, 0x02), EPERM),
        ("mprotect", (0, 4096, 3), ALLOW),
        ("mprotect", (0, 4096, 5), EPERM),
        ("mprotect", (0, 4096, 7), EPERM),
        *[("fcntl", (3, command), ALLOW) for command in (0, 1, 2, 3, 4, 1030)],
        *[("fcntl", (3, command), EPERM) for command in (6, 8, 10, 15, 1024, 1026, 1031, 1033)],
        *[("ioctl", (0, request), ALLOW) for request in (0x5401, 0x5421)],
        *[("ioctl", (0, request), ENOTTY) for request in (0x5412, 0x8901, 0x8904, 0x5410)],
        ("prlimit64", (0, 7, 0, 1), ALLOW),
        ("prlimit64", (0, 3, 1, 0), ALLOW),  # of its own stack
        ("prlimit64", (0, 7, 1, 0), EPERM),
        ("prlimit64", (0, 7, 1 << 32, 0), EPERM),
        ("prlimit64", (1, 7, 0, 1), EPERM),
        ("prlimit64", (1, 3, 1, 0), EPERM),
        ("sched_getaffinity", (0, 8, 1), ALLOW),
        ("sched_getaffinity", (1, 8, 1), EPERM),
    ],
)
def test_arguments_decide(machine, name, arguments, expected):
    assert verdict(machine, numbers(machine)[name], arguments) == expected


def test_numbers_are_those_of_the_kernels_headers():
    headers = {
        "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        "aarch64": Path("/usr/include/asm-generic/unistd.h"),
    }
    if not any(map(Path.is_file, headers.values())):
        pytest.skip("no kernel headers")
    for machine, header in headers.items():
        if not header.is_file():
            continue
        named = {}
        for line in header.read_text().splitlines():
            match line.split():
                case ["#define", name, number] if name.startswith("__NR") and number.isdigit():
                    named[name.removeprefix("__NR3264_").removeprefix("__NR_")] = int(number)
        named.setdefault("newfstatat", named.get("fstatat"))
        own = numbers(machine)
        own |= numbers(machine, DANGEROUS)
        assert own == {name: named[name] for name in own}


UNDER_THE_FILTER = """
    import ctypes, json, sys
    from sage_unsloth.grading import seccomp
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    listed = json.loads(sys.argv[1])
    assert seccomp.filter_calls()
    through = []
    for number in (*range(600), *range(0x40000000, 0x40000000 + 600)):
        if number in listed:
            continue
        value = syscall(number, 0, 0, 0, 0, 0, 0)
        if (value, ctypes.get_errno()) != (-1, 38):
            through.append(number)
    print(through)
"""
# uretprobe and uprobe (x86-64), which no filter sees: they end whoever calls them (SIGILL).
UNFILTERED = (335, 336)


def run_python(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        **dict(capture_output=True, text=True, timeout=120),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_the_filter = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="no filter for this machine"
)


@needs_the_filter
def test_the_kernel_refuses_every_call_that_is_not_listed():
    listed = json.dumps([*numbers(platform.machine()).values(), *UNFILTERED])
    assert run_python(UNDER_THE_FILTER, listed) == "[]\n"


AT_WORK = """
    from sage_unsloth.grading.seccomp import filter_calls
    assert filter_calls()
    import bz2, concurrent.futures, datetime, decimal, fractions, hashlib, lzma, mmap, os, random
    import re, resource, signal, sqlite3, statistics, sys, threading, time, uuid, zlib
    import numpy, sympy
    values = numpy.random.default_rng(0).normal(size=(200, 200))
    matrix = values @ values.T + numpy.eye(200)
    assert numpy.allclose(numpy.linalg.inv(matrix) @ matrix, numpy.eye(200))
    assert numpy.linalg.svd(values)[1].shape == (200,)
    x = sympy.symbols("x")
    assert str(sympy.factor(x**6 - 1)).count("x") == 6
    assert sympy.integrate(sympy.sin(x), (x, 0, sympy.pi)) == 2
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(lambda i: i * i, range(1000))) == 332833500
    assert len(hashlib.sha256(b"x" * 10**7).hexdigest()) == len(hashlib.blake2b().hexdigest()) // 2
    assert zlib.decompress(zlib.compress(b"a" * 10**6)) == b"a" * 10**6
    assert str(decimal.Decimal(2).sqrt()).startswith("1.41421356") and 3**20000 % 7 >= 0
    assert random.random() < 1 and uuid.uuid4().version == 4
    resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
    threading.stack_size(2**26)
    sys.setrecursionlimit(50_000)
    def depth(n):
        return n and 1 + depth(n - 1)
    results = []
    thread = threading.Thread(target=lambda: results.append(depth(20_000)))
    thread.start()
    thread.join()
    assert results == [20_000]
    rung = []
    signal.signal(signal.SIGALRM, lambda *arguments: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05)
    assert rung == [1]
    assert os.cpu_count() >= 1 and datetime.datetime.now().year > 2000
    assert sqlite3.connect(":memory:").execute("select 1 + 1").fetchone() == (2,)
    assert mmap.mmap(-1, 4096)[:1] == b"\\0"
    print("works")
"""


@needs_the_filter
def test_what_computes_works_under_the_filter():
    assert run_python(AT_WORK) == "works\n"


# --- where the kernel cannot ----------------------------------------------------------------------

UNCONFINED = """
    import ctypes, json, platform, sys
    sys.path.insert(0, sys.argv[2])
    from hostile_runner import LANDLOCK, UNSHARE, kernel_without
    prctl = 167 if platform.machine() == "aarch64" else 157
    missing = [*LANDLOCK, UNSHARE[platform.machine()]]
    missing += [prctl] if "filter" in sys.argv[1] else []
    if "machine" in sys.argv[1]:
        missing, platform.machine = [], lambda: "riscv64"
        code = "import platform; platform.machine = lambda: 'riscv64'; "
        from sage_unsloth.grading import programs
        programs._START = code + programs._START
    else:
        kernel_without(*missing)
    from sage_unsloth.grading.grader import Grader
    from sage_unsloth.grading.verifiers import get_verifier
    from sage_unsloth import doctor
    gold = json.dumps({"inputs": ["2 3"], "outputs": ["5"]})
    checker = get_verifier("python", allow_unconfined="allowed" in sys.argv[1])
    with Grader(checker=checker, time_limit=20.0) as grader:
        try:
            grader.check_workers()
        except ValueError as error:
            print("refused:", error)
            check = doctor._programs()
            print(check.status, check.detail, check.remedy)
        else:
            print(grader.grade_answers(["print(sum(map(int, input().split())))"], [gold])[0])
            print(grader.grade_answers(["import os\\nos.fork()\\nprint(5)"], [gold])[0])
            print(grader.kept_from)
"""


def without_layers(how):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNCONFINED), how, str(RUNNER.parent)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@needs_the_filter
def test_a_kernel_that_cannot_confine_is_refused_unless_allowed():
    out, _ = without_layers("landlock")
    assert "must be confined (files, network, processes, limits)" in out
    assert "cannot confine files. Use Linux 5.13" in out and "--allow-unconfined" in out
    assert "warn" in out.splitlines()[1] and "cannot block files" in out.splitlines()[1]
    out, _ = without_layers("landlock and filter")
    assert "cannot confine files, network, processes, limits." in out
    out, err = without_layers("allowed: landlock and filter")
    assert out.splitlines() == ["correct", "wrong", "()"], "the audit hook still ends a fork"
    assert "run without being kept from files, network, processes, limits" in err


@needs_the_filter
def test_a_machine_without_a_filter_is_refused_unless_allowed():
    out, _ = without_layers("another machine")
    assert "cannot confine" in out and "processes, limits." in out
    assert out.splitlines()[1].startswith("warn")


def test_the_server_knows_its_own_settings():
    settings = program_confinement.server_settings()
    assert settings == program_confinement.server_settings()
    assert resource.getrlimit(resource.RLIMIT_AS) in settings
    assert os.sched_getaffinity(0) in settings
