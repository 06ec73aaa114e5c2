"""Signals: SIGTERM (the machine shuts down), SIGHUP (the terminal is gone) and Ctrl-C.

The first one lets work in flight finish and be saved, a second one ends the run at once. A shutdown
may reach a process twice, from the system and from its parent, so SIGTERM and SIGHUP within
`REPEATED` seconds of the first count as the same one.

Work in flight is an optimizer step or a batch of completions (`finishing`). Elsewhere nothing would
be lost, and the first signal ends the run: Ctrl-C by Python's KeyboardInterrupt, and on the command
line SIGTERM by an exception too, so that locks, worker processes and patches are undone (`ending`).
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNWINDING = 10.0  # seconds for everything that is open to be closed
REPEATED = 5.0  # seconds

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
"""An argument of `signal.signal`."""

logger = logging.getLogger(__name__)


class Terminated(SystemExit):
    """Ended by SIGTERM or SIGHUP; the exit code is the shell's, 143 or 129."""

    def __init__(self, message: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signum = signal.Signals(signum)
        self.code = 128 + signum


class Stop:
    """Shared between `finishing` and the loop inside it.

    Attributes:
        cause: the signal that requested the end, or None.
        saved: what is saved, for the message.
    """

    cause: signal.Signals | None = None
    saved: str = "everything that was finished is on disk"


@contextlib.contextmanager
def finishing(step: str) -> Iterator[Stop]:
    """Inside, the first signal only sets `cause`, so that the step in flight can be finished.

    The loop inside checks `cause` after each step and ends; on leaving, the signal is raised. A
    second one has its usual effect: Ctrl-C stops at once. Only in the main thread, where Python
    allows handlers, and not for signals that the process was started to ignore.

    Args:
        step: the work in flight, for the message.

    Raises:
        KeyboardInterrupt: Ctrl-C; the message says what is saved.
        Terminated: the same for SIGTERM or SIGHUP.
    """
    stop, received = Stop(), []  # by this process; another one may have set `cause`

    def ask(signum: int, frame: FrameType | None) -> None:
        if not received:
            received.append(time.monotonic())
            if stop.cause is None:
                stop.cause = signal.Signals(signum)
                logger.warning(
                    "\n%s: %s is finished and saved first. Repeat it to stop at once.",
                    stop.cause.name,
                    step,
                )
        elif not _is_repeated(signum, received[0]):
            signal.signal(signum, before[signal.Signals(signum)])
            signal.raise_signal(signum)

    with _handlers(ask) as before:
        yield stop
    if stop.cause is not None:
        raise _end(stop.cause, f"stopped by {stop.cause.name}: {stop.saved}")


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """For a command: a signal raises KeyboardInterrupt or Terminated, a second one exits.

    The exception may get lost in two ways. Python drops those raised in callbacks of its garbage
    collector, where a program that frees models often is: then it is raised again. A bare except
    around an import in a library takes it for a missing package: then the process is ended after
    `UNWINDING` seconds.
    """
    requested: list[int] = []
    began = 0.0
    report = sys.unraisablehook

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal began
        if not requested:
            began = time.monotonic()
            requested.append(signum)
            rise()
        elif not _is_repeated(signum, began):
            os._exit(128 + signum)

    def rise(*_: object) -> None:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + requested[0]))
        signal.setitimer(signal.ITIMER_REAL, UNWINDING)
        raise _end(requested[0], f"stopped by {signal.Signals(requested[0]).name}")

    def dropped(unraisable: "sys.UnraisableHookArgs") -> None:
        if requested and isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
            signal.signal(signal.SIGALRM, rise)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            report(unraisable)

    with _handlers(end):
        sys.unraisablehook = dropped
        try:
            yield
        finally:
            if requested:
                signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = report


def allow(seconds: float) -> None:
    """Inside `ending`, after it has raised: allows this many seconds instead of `UNWINDING`."""
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _end(signum: int, message: str) -> BaseException:
    return KeyboardInterrupt(message) if signum == signal.SIGINT else Terminated(message, signum)


def _is_repeated(signum: int, first: float) -> bool:
    return signum != signal.SIGINT and time.monotonic() - first < REPEATED


@contextlib.contextmanager
def _handlers(handle: Handler) -> Iterator[Mapping[signal.Signals, Handler]]:
    """Sets the handler of the signals, yields the old ones, and restores them."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    before = {s: old for s, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for signum in before:
            signal.signal(signum, handle)
        yield before
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
