"""Runs hostile programs as one kind of user on one kind of kernel, and an honest one after each.

    python tests/grading/hostile_runner.py [--user] [--no-namespaces] [--no-landlock] [--insist]
        [--seconds 1] [CLASS ...]

This process stands for the trainer: the expected output is in a file, in its environment and in its
memory, and another process of the same user runs. Written to standard output: a line of JSON on
what programs are kept from, and one for each program with its grade, whether the honest program
after it was right, and what of this process, of the other one and of the folder had changed.
`{"skip": reason}` where the machine cannot make such a user or kernel.
"""

import argparse
import ctypes
import json
import os
import platform
import resource
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, os.environ.get("CODE_UNDER_TEST", str(ROOT)))
SECRET = "expected-only-by-the-test-7341"
NOBODY = 65_534
LANDLOCK, UNSHARE = (444, 445, 446), {"x86_64": 272, "aarch64": 97}
ADD = json.dumps(["assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"])
HONEST = "def add(a, b):\n    return a + b  # "

# Calls of the kernel past Python's audit hook: the C library's `syscall`, looked up in memory.
NATIVE = """
import _ctypes, ctypes, struct
size, pointer = ctypes.c_size_t, ctypes.c_void_p
move = ctypes.CFUNCTYPE(pointer, pointer, pointer, size)(_ctypes._memmove_addr)
def peek(address, count):
    buffer = (ctypes.c_char * count)()
    move(buffer, address, count)
    return buffer.raw
base = _ctypes._memmove_addr & ~4095
while peek(base, 4) != b"\\x7fELF":
    base -= 4096
(offset,) = struct.unpack("<Q", peek(base + 32, 8))
(count,) = struct.unpack("<H", peek(base + 56, 2))
heads = [struct.unpack("<IIQQQQQQ", peek(base + offset + 56 * i, 56)) for i in range(count)]
dynamic = next(base + head[3] for head in heads if head[0] == 2)
entries = {}
while (tag := struct.unpack("<QQ", peek(dynamic, 16)))[0]:
    entries[tag[0]] = tag[1] if tag[1] >= base else tag[1] + base
    dynamic += 16
symbols, names = entries[6], entries[5]
def address_of(name):
    for at in range(symbols, names, 24):
        text, _, _, _, value, _ = struct.unpack("<IBBHQQ", peek(at, 24))
        if peek(names + text, len(name) + 1) == name + b"\\0" and value:
            return base + value
long = ctypes.c_long
call = ctypes.CFUNCTYPE(long, *[long] * 7)(address_of(b"syscall"))
def syscall(number, *arguments):
    return call(number, *arguments, *[0] * (6 - len(arguments)))
def data(content):
    block = (ctypes.c_char * max(1, len(content)))(*content)
    kept.append(block)
    return ctypes.cast(block, pointer).value
kept = []
"""


def skip(reason: str) -> None:
    print(json.dumps({"skip": reason}))
    sys.exit(0)


def kernel_without(*calls: int) -> None:
    """From now on these system calls fail as ones that the kernel does not have (ENOSYS, 38)."""
    lines = [(0x20, 0, 0, 0)]
    for number in calls:
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | 38)]
    code = b"".join(struct.pack("HBBI", *line) for line in [*lines, (0x06, 0, 0, 0x7FFF0000)])
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, ctypes.c_ulong(2), program, 0, 0) == 0


def become_user() -> None:
    """Gives up root: another user, without capabilities, who cannot get them back."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        open_to_all(libc)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(38, 1, 0, 0, 0)
    if subprocess.run([sys.executable, "-c", ""], check=False).returncode:
        skip("an ordinary user cannot run this Python")


def open_to_all(libc: ctypes.CDLL) -> None:
    """Where Python or the code lies in a folder of root's alone, others see just these below it."""
    needed = {sys.base_prefix, sys.prefix, str(ROOT), *filter(os.path.isdir, sys.path)}
    closed: dict[Path, list[str]] = {}
    for path in needed:
        folders = [*reversed(Path(path).resolve().parents), Path(path).resolve()]
        for folder in folders:
            if not folder.stat().st_mode & stat.S_IXOTH:
                closed.setdefault(folder, []).append(str(folders[-1]))
                break
    if not closed:
        return
    if libc.unshare(0x0002_0000) or libc.mount(b"none", b"/", None, 0x4_4000, None):
        skip("Python lies in a folder of root's, and this kernel grants no mount namespace")
    for folder, paths in closed.items():
        outermost = [p for p in paths if not any(p.startswith(f"{q}/") for q in paths)]
        opened = {path: os.open(path, os.O_PATH) for path in outermost}
        assert libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"mode=755") == 0
        for path, descriptor in opened.items():
            os.makedirs(path)
            source = f"/proc/self/fd/{descriptor}".encode()
            assert libc.mount(source, path.encode(), None, 0x5000, None) == 0
            os.close(descriptor)


def state_of(pid: int) -> list:
    """Limits, processors and priorities of a process."""
    kinds = sorted({getattr(resource, n) for n in vars(resource) if n.startswith("RLIMIT_")})
    io_priority = {"x86_64": 252, "aarch64": 31}[platform.machine()]
    return [
        [resource.prlimit(pid, kind) for kind in kinds],
        sorted(os.sched_getaffinity(pid)),
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getscheduler(pid),
        ctypes.CDLL(None).syscall(io_priority, 1, pid),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("user", "no-namespaces", "no-landlock", "insist"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("classes", nargs="*")
    options = parser.parse_args()
    os.environ["EXPECTED"] = SECRET
    if options.user:
        become_user()
    missing = [UNSHARE[platform.machine()]] if options.no_namespaces else []
    missing += LANDLOCK if options.no_landlock else ()
    if missing:
        kernel_without(*missing)

    from sage_unsloth.grading.checker import Grade
    from sage_unsloth.grading.grader import Grader
    from sage_unsloth.grading.verifiers import get_verifier

    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    (folder / "tests.json").write_text(SECRET)
    rows = map(json.loads, (ROOT / "data/hostile_programs.jsonl").read_text().splitlines())
    golds = {
        "stdin": json.dumps({"inputs": ["go\n"], "outputs": [SECRET]}),
        "calls": json.dumps({"inputs": [[1]], "outputs": [SECRET], "fn_name": "f"}),
        "asserts": json.dumps([f"assert f(1) == {SECRET!r}"]),
        # A program prints this where a call that must be refused was not.
        "through": json.dumps({"inputs": ["go\n"], "outputs": ["through"]}),
    }
    golds["names"] = golds["through"]  # the same, of what only namespaces keep from it
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    processes = {"trainer": os.getpid(), "other process": other.pid}
    before = {name: state_of(pid) for name, pid in processes.items()}
    checker = get_verifier("python", allow_unconfined=options.insist)
    with Grader(time_limit=options.seconds, memory_limit_gib=0.25, checker=checker) as grader:
        try:
            grader.check_workers()
        except ValueError as error:
            print(json.dumps({"refused": str(error)}))
            other.kill()
            return
        worker = grader._workers.all[0]  # type: ignore[attr-defined]
        namespaces = getattr(worker, "namespaces", ())  # none in code from before there were any
        print(json.dumps({"kept_from": worker.kept_from, "namespaces": namespaces}))
        for row in rows:
            if options.classes and row["class"] not in options.classes:
                continue
            gold = row["tests"] if row["tests"].startswith(("[", "{")) else golds[row["tests"]]
            program = row["program"].replace("FOLDER", str(folder)).replace("NATIVE\n", NATIVE)
            program = program.replace("OTHER", str(other.pid)).replace("PID", str(os.getpid()))
            program = program.replace("SERVER", str(worker.process.pid if worker.process else 0))
            started, used = time.monotonic(), time.process_time()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            ((grade, _),) = grader.judge_answers([program], [gold])
            result = {
                "id": row["id"],
                "grade": grade,
                "seconds": round(time.monotonic() - started, 3),
                "cpu_ms": round(1000 * (time.process_time() - used), 1),
                "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak,
            }
            changed = [name for name, pid in processes.items() if state_of(pid) != before[name]]
            changed += ["other process ended"] if other.poll() is not None else []
            if sorted(os.listdir(folder)) != ["tests.json"]:
                changed.append("folder")
            if (folder / "tests.json").read_text() != SECRET:
                changed.append("file")
            worker.time_limit = 20.0
            ((after, _),) = grader.judge_answers([HONEST + row["id"]], [ADD])
            worker.time_limit = options.seconds
            result |= {"changed": changed, "honest": after is Grade.CORRECT}
            print(json.dumps(result), flush=True)
    other.kill()


if __name__ == "__main__":
    main()
