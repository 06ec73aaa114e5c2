"""What starts programs that nobody trusts, each in a confined process of its own.

This process imports what programs usually import, forks a child for each program, feeds it, reads
what it writes, and kills it. It knows no expected output: what it returns is compared elsewhere
(`programs`). A child has, before it runs the program:

    time        the server kills it after its seconds; a limit on CPU time besides
    memory      RLIMIT_AS
    files       none to read but Python's own library and the system's shared ones (Landlock), none
                to write (Landlock, seccomp, RLIMIT_FSIZE)
    processes   none to start, signal, trace or see (seccomp, Landlock); threads are allowed
    network     none (seccomp, and a namespace of its own where the kernel grants one)
    Python      ends the child that tries any of it, or ctypes (audit hook)
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
from typing import Any, BinaryIO, NoReturn

from sage_unsloth.grading.confinement import end_on_refused_events, leave_network
from sage_unsloth.grading.program_confinement import Confinement, kept_from
from sage_unsloth.grading.program_values import decode, encode

LONGEST_OUTPUT = 2**20  # bytes; a program that writes more is killed
NOT_PYTHON = 65  # exit status of a child whose program does not compile
USUAL = (
    "bisect", "collections", "contextlib", "copy", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics",
    "string", "threading", "typing",
)  # fmt: skip


def serve(memory_limit_gib: float) -> NoReturn:
    """Runs programs until standard input ends.

    Lines of JSON: `{"program", "seconds"}` with "stdin" (text) or "calls" (a list of [name,
    arguments, arguments by name], the values encoded by `encode`) in; `{"end": "exit" | "late" |
    "long", "status": exit status, "output": text}` out. The first line out says from what a
    program is kept: `{"kept_from": [...]}`, as a child tried.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        leave_network()
    confinement = Confinement(int(memory_limit_gib * 2**30))
    for name in USUAL:
        __import__(name)
    for name in ("exit", "quit"):  # as outside, where `site` adds them
        setattr(builtins, name, sys.exit)
    gc.freeze()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    _send(replies, {"kept_from": kept_from(confinement)})
    for line in requests:
        _send(replies, _run(confinement, json.loads(line)))
    sys.exit(0)


def _send(replies: BinaryIO, message: dict) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def _run(confinement: Confinement, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one program, and kills it at the end of its time."""
    from_child, to_server = os.pipe()
    from_server, to_child = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
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
        for kill in (os.killpg, os.kill):  # the group, once the child has made it
            try:
                kill(child, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"end": end, "status": status, "output": output.decode("utf-8", "replace")}


def _exchange(
    reading: int, writing: int, content: bytes, seconds: float, child: int
) -> tuple[str, bytes]:
    """Feeds a child and reads from it until it ends; how it ended, and what it wrote."""
    deadline, output = time.monotonic() + seconds, bytearray()
    os.set_blocking(writing, False)
    rest, open_input, open_output = memoryview(content), True, True
    while open_output:
        if open_input and not rest:
            os.close(writing)
            open_input = False
        left = deadline - time.monotonic()
        ready = select.select([reading], [writing] if open_input else [], [], max(0.0, left))
        if not (ready[0] or ready[1]):
            break
        if ready[1]:
            try:
                rest = rest[os.write(writing, rest[:65_536]) :]
            except BrokenPipeError:
                rest = memoryview(b"")
        if ready[0]:
            part = os.read(reading, 65_536)
            output += part
            open_output = bool(part)
        if len(output) > LONGEST_OUTPUT or time.monotonic() > deadline:
            break
    if open_input:
        os.close(writing)
    if len(output) > LONGEST_OUTPUT:
        return "long", b""
    while time.monotonic() < deadline:  # its output is closed, as at its end
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return "exit", bytes(output)
        time.sleep(0.0005)
    return "late", b""


def _run_child(
    confinement: Confinement, request: dict[str, Any], from_server: int, to_server: int
) -> int:
    """In the child: the exit status of the program."""
    calls = request.get("calls")
    results = 3  # where the values of calls are written
    high = fcntl.fcntl(to_server, fcntl.F_DUPFD, 100)
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
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    confinement.enter(request["seconds"])
    end_on_refused_events(lambda event: None)
    try:
        code = compile(request["program"], "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return NOT_PYTHON
    if calls is None:
        return _finished(code, module.__dict__)
    try:
        exec(code, module.__dict__)
        for name, arguments, by_name in calls:
            value = module.__dict__[name](
                *map(decode, arguments), **{key: decode(item) for key, item in by_name.items()}
            )
            os.write(results, json.dumps(encode(value)).encode() + b"\n")
    except MemoryError:
        return 1
    except BaseException:
        return 1
    return 0


def _finished(code: Any, names: dict[str, Any]) -> int:
    """The exit status of a program that is run to its end, its threads included."""
    status = 0
    try:
        exec(code, names)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        return 1
    for thread in __import__("threading").enumerate():
        if not thread.daemon and thread is not __import__("threading").current_thread():
            thread.join()
    try:
        sys.stdout.flush()
    except OSError:
        return 1
    return status & 255
