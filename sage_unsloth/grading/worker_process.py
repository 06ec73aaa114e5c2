"""What runs in a grading worker.

Its first process imports what the function needs, sees no text of a model, and forks the children
that do, one after another: a new one is ready milliseconds after the last was killed, died or grew.
Importing again would take half a second each time, so short answers that hang could hold up a
training step for minutes.
"""

import gc
import importlib
import json
import logging
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from sage_unsloth.grading.confinement import VIOLATION_STATUS, confine, leave_network
from sage_unsloth.own_code import OwnCodeError

RESERVE = 2**26
"""A child counts as out of memory within this many bytes of its limit.

A library that catches every exception catches MemoryError too, and then calls the text unreadable.
"""
MAX_GROWTH = 2**26
"""Bytes by which a child may grow before it is replaced: math-verify caches without a bound."""


def serve(
    function: str,
    time_limit: float,
    memory_limit_gib: float,
    typical: Sequence[Sequence[str]],
    ready_pipe: int,
) -> None:
    """What a worker process runs.

    Lines of JSON: `[number, text, text]` in; out `{"number": ..., "value": ...}`, with "error"
    instead of "value" for a traceback and also "told" for an error in a user's code, or
    `{"refused": event}`. A reply with "last" is the child's last one. A child with too little
    memory ends without a reply.

    Args:
        function: "module:name".
        time_limit: seconds; a child ends itself after about twice as many.
        memory_limit_gib: address space of a child.
        typical: pairs that are compared before the first fork, so that children share caches.
        ready_pipe: file descriptor. Each child writes `{"pid": ..., "kept_from": [layers of
            confinement]}` to it before its first question, and closes it: no text of a model can
            have forged that line.
    """
    memory_limit = int(memory_limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    # A machine that shuts down sends it to all processes while the caller still needs grades;
    # the worker ends with its pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kept_from = ["namespace"] if leave_network() else []
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints goes to stderr: only replies may reach the pipe
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    # Imports and caches are made before the fork, once for all children.
    for question in (("x", "x"), *typical):
        call(*question)
    gc.freeze()  # so that the children share the memory of what is imported
    while True:
        child = os.fork()
        if child == 0:
            _run_child(call, time_limit, memory_limit, replies, ready_pipe, kept_from)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if (
            status >= 0 and status != VIOLATION_STATUS
        ):  # the caller is gone, or the child could not start
            sys.exit(status)


def _run_child(*arguments: Any) -> None:
    """Runs `_answer` and ends the process, so that nothing returns into the forking loop."""
    status = 1
    try:
        _answer(*arguments)
        status = 0
    except MemoryError:
        status = VIOLATION_STATUS
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(
    call: Callable[[str, str], Any],
    time_limit: float,
    memory_limit: int,
    replies: IO[str],
    ready_pipe: int,
    kept_from: list[str],
) -> None:
    """Answers questions until standard input ends.

    Raises:
        MemoryError: the last question needed too much memory, even if a library caught the error.
    """

    def reply(message: dict) -> None:
        print(json.dumps(message), file=replies, flush=True)

    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    if confine(lambda event: reply({"refused": event})):
        kept_from = [*kept_from, "landlock"]
    # After confinement and before the first question: the caller can trust this line alone.
    os.write(ready_pipe, json.dumps({"pid": os.getpid(), "kept_from": kept_from}).encode() + b"\n")
    os.close(ready_pipe)
    os.dup2(silence, 2)  # what a library says about an answer holds the answer's text
    os.close(silence)
    resident_at_start, _ = _peaks()
    for line in sys.stdin:
        # The caller kills a late child. The alarm ends one whose caller is gone, and the limit on
        # CPU time one that has turned the alarm off.
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit + 1)
        # The limit counts from the start of the process, so it is moved on with each question.
        seconds = math.ceil(time.process_time() + 2 * time_limit + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        number, *question = json.loads(line)
        try:
            answer = {"number": number, "value": call(*question)}
        except MemoryError:
            raise
        except OwnCodeError as error:
            trace = "".join(traceback.format_exception(error.__cause__ or error))
            answer = {"number": number, "told": str(error), "error": trace}
        except Exception:
            answer = {"number": number, "error": traceback.format_exc()}
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Peaks and not the present size: a library may have caught MemoryError and freed what it
        # held.
        resident, reserved = _peaks()
        if reserved > memory_limit - RESERVE:
            raise MemoryError
        last = resident - resident_at_start > MAX_GROWTH
        reply(answer | {"last": last})
        if last:
            os._exit(VIOLATION_STATUS)


def _peaks() -> tuple[int, int]:
    """Peak resident memory and peak address space of this process, in bytes.

    The second is 0 where the kernel does not report it (macOS); a MemoryError that a library
    catches goes unnoticed there.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    result = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024 * int(result["VmHWM"].split()[0]), 1024 * int(result["VmPeak"].split()[0])
