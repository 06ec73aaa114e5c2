"""Starts untrusted programs, each in its own confined process.

This process imports common modules, forks a child for each program, feeds it, reads its output and
kills it. It knows no expected output: results are compared elsewhere (`programs`). A child has,
before it runs the program:

    time        the server kills it after its seconds; a limit on CPU time besides
    memory      RLIMIT_AS
    files       reads only Python's library and the system's shared ones (Landlock), writes none
                (Landlock, seccomp, RLIMIT_FSIZE); sees no others where namespaces are granted
    processes   none to start, signal, trace or limit (seccomp, Landlock), none visible where
                namespaces are granted; `MOST_THREADS` threads
    network     none (seccomp, and a namespace where granted)
    Python      ends the child that tries any of it, or ctypes (audit hook)

After each program the server checks its own limits, affinity and priority; if they changed, the
caller replaces the server and asks again.
"""

import builtins
import fcntl
import gc
import io
import json
import os
import select
import signal
import sys
import time
import traceback
import typing
from typing import Any, BinaryIO, NoReturn

from sage_unsloth.grading.confinement import end_on_refused_events
from sage_unsloth.grading.program_confinement import (
    Confinement,
    Namespaces,
    denied_access,
    kill_with_parent,
    server_settings,
)
from sage_unsloth.grading.program_values import decode, encode, output_digest

LONGEST_OUTPUT = 2**20  # bytes; a program that writes more is killed
MOST_THREADS = 128  # a program that has more is killed
LONGEST_FLOAT = 40  # characters of a number in a result; Python writes 24 at most
POLL = 0.02  # seconds between two looks at the number of threads
SOLUTION = "Solution"  # LeetCode's form: a class of this name has the function as a method
ANNOTATIONS = {name: getattr(typing, name) for name in ("Dict", "List", "Optional", "Set", "Tuple")}
"""Names of `typing` that signatures of LeetCode and APPS use without an import."""
NOT_PYTHON = 65  # exit status of a child whose program does not compile
USUAL = (
    "bisect", "collections", "contextlib", "copy", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics",
    "string", "threading", "typing",
)  # fmt: skip


def serve_programs(memory_limit_gib: float) -> NoReturn:
    """Runs programs until standard input ends.

    Reads lines of JSON: `{"program", "seconds"}` with "stdin" (text) or "calls" (a list of [name,
    arguments, arguments by name], encoded by `encode`). Writes a line of JSON, followed by the
    results if functions were called:

        end         "exit", "late" or "killed"
        status      exit status
        digest      `output_digest` of the standard output
        empty       whether it wrote nothing
        length      bytes of the results
        moved       whether this process's own settings have changed

    The first line written says what a child could not do, and which namespaces it has:
    `{"kept_from": [...], "namespaces": [...]}`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    namespaces = Namespaces()
    namespaces.enter()
    confinement = Confinement(int(memory_limit_gib * 2**30), namespaces)
    for name in USUAL:
        __import__(name)
    # The server starts with -S, so `site` has not added them.
    for name in ("exit", "quit"):  # as outside, where `site` adds them
        setattr(builtins, name, sys.exit)
    gc.freeze()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # A program must not read the server's requests.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    settings = server_settings()
    _send(replies, {"kept_from": denied_access(confinement), "namespaces": namespaces.granted})
    for line in requests:
        reply, results = _run(confinement, json.loads(line))
        _send(replies, reply | {"moved": server_settings() != settings}, results)
    sys.exit(0)


def _send(replies: BinaryIO, message: dict, content: bytes = b"") -> None:
    replies.write(json.dumps(message).encode() + b"\n" + content)
    replies.flush()


def _run(confinement: Confinement, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Runs one program within its time; the reply and its results."""
    from_child, to_server = os.pipe()
    from_server, to_child = os.pipe()
    child = confinement.namespaces.fork()
    if child == 0:
        status = 1
        try:
            kill_with_parent()
            # A group of its own, so that its threads and children are killed with it.
            os.setpgid(0, 0)
            status = _run_child(confinement, request, from_server, to_server)
        except MemoryError:
            status = 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(to_server)
    os.close(from_server)
    content = request.get("stdin", "").encode("utf-8", "surrogatepass")
    try:
        end, output = _exchange(from_child, to_child, content, request["seconds"], child)
    finally:
        os.close(from_child)
        # Killed even if it ended: a child of it may hold the pipe.
        for kill in (os.killpg, os.kill):  # the group, once the child has made it
            try:
                kill(child, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if "calls" in request:
        digest, results = "", output
        if not _are_results(output):
            status, results = status or 1, b""
    else:
        digest, results = output_digest(output.decode("utf-8", "replace")), b""
    reply = {"end": end, "status": status, "digest": digest, "length": len(results)}
    return reply | {"empty": not output}, results


def _are_results(output: bytes) -> bool:
    """Whether an output is ASCII lines of JSON that can be read in bounded time.

    This process reads them before the caller does, because it can be replaced if reading breaks it.
    """

    def read_float(text: str) -> float:
        if len(text) > LONGEST_FLOAT:
            raise ValueError("no float is written so")
        return float(text)

    try:
        for line in output.decode("ascii").splitlines():
            json.loads(line, parse_float=read_float)
    except (ValueError, RecursionError, MemoryError):
        return False
    return True


def _threads(path: str) -> int:
    """The number of threads of a process, by its folder in /proc; 1 if unknown."""
    try:
        with open(f"{path}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[17])
    except (OSError, IndexError):
        return 1


def _exchange(
    reading: int, writing: int, content: bytes, seconds: float, child: int
) -> tuple[str, bytes]:
    """Feeds a child and reads from it until it ends; how it ended, and its output.

    The child's first line is its folder in /proc, written before the program runs.
    """
    started, output = time.monotonic(), bytearray()
    deadline, looked, folder = started + seconds, started, bytearray()

    def limit_reached() -> str:
        nonlocal looked
        now = time.monotonic()
        if now > deadline:
            return "late"
        if folder and now - looked > POLL:
            looked = now
            return "killed" if _threads(os.fsdecode(bytes(folder))) > MOST_THREADS else ""
        return ""

    # A program that never reads would block the server in write().
    os.set_blocking(writing, False)
    rest, open_input, open_output = memoryview(content), True, True
    end = ""
    while open_output and not end:
        if open_input and not rest:
            os.close(writing)
            open_input = False
        wait = max(0.0, min(POLL, deadline - time.monotonic()))
        ready = select.select([reading], [writing] if open_input else [], [], wait)
        if ready[1]:
            try:
                rest = rest[os.write(writing, rest[:65_536]) :]
            except BrokenPipeError:
                rest = memoryview(b"")
        if ready[0]:
            part = os.read(reading, 65_536)
            output += part
            open_output = bool(part)
            if not folder and b"\n" in output:
                folder, _, output = output.partition(b"\n")
        end = "killed" if len(output) > LONGEST_OUTPUT else limit_reached()
    if open_input:
        os.close(writing)
    while not end:  # its output is closed, as at its end
        # WNOWAIT leaves the exit status for `waitpid` above.
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return "exit", bytes(output)
        time.sleep(0.0005)
        end = limit_reached()
    return end, b""


def _run_child(
    confinement: Confinement, request: dict[str, Any], from_server: int, to_server: int
) -> int:
    """Runs the program, in the child; its exit status."""
    calls = request.get("calls")
    results = 3  # where the values of calls are written
    # Above 100, so that the low numbers can be closed in one go.
    high = fcntl.fcntl(to_server, fcntl.F_DUPFD, 100)
    folder = "/proc/" + (os.readlink("/proc/self") if os.path.islink("/proc/self") else "none")
    os.write(high, os.fsencode(folder) + b"\n")
    if confinement.ruleset is not None:
        confinement.ruleset = fcntl.fcntl(confinement.ruleset, fcntl.F_DUPFD, 100)
    os.dup2(from_server, 0)
    os.dup2(high if calls is None else os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(3, 100)
    if calls is not None:
        os.dup2(high, results)
    os.close(high)
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb"), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb"), encoding="utf-8", errors="replace")
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb"), encoding="utf-8", errors="replace")
    sys.argv, sys.dont_write_bytecode = ["program.py"], True
    # A fresh module: the program's `__main__` has nothing of the server's.
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    confinement.enter(request["seconds"])
    # A second net after the kernel's, and the only one on macOS.
    end_on_refused_events(lambda event: None)
    try:
        code = compile(request["program"], "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return NOT_PYTHON
    if calls is None:
        return _exit_status(code, module.__dict__)
    try:
        module.__dict__.update(ANNOTATIONS)
        exec(code, module.__dict__)
        for name, arguments, by_name in calls:
            function = _find_function(module.__dict__, name)
            value = function(
                *map(decode, arguments), **{key: decode(item) for key, item in by_name.items()}
            )
            text = json.dumps(encode(value), separators=(",", ":"))
            os.write(results, text.encode() + b"\n")
    except MemoryError:
        return 1
    except BaseException:
        return 1
    return 0


def _find_function(names: dict[str, Any], name: str) -> Any:
    """The tested function: a global of the program, or a method of a new `Solution`."""
    if name in names or SOLUTION not in names:
        return names[name]
    return getattr(names[SOLUTION](), name)


def _exit_status(code: Any, names: dict[str, Any]) -> int:
    """The exit status of a program that runs to its end, with its threads."""
    status = 0
    try:
        exec(code, names)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        return 1
    for thread in __import__("threading").enumerate():
        # As at the end of a script: Python waits for threads that are not daemons.
        if not thread.daemon and thread is not __import__("threading").current_thread():
            thread.join()
    try:
        sys.stdout.flush()
    except OSError:
        return 1
    return status & 255
