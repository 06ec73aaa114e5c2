"""What SIGTERM (a machine that is taken away), SIGHUP (a terminal that is gone) and Ctrl-C do: what
is in flight is finished and saved first.

A second one ends it at once; but a shutdown may reach a process twice, from the system and from its
parent, so SIGTERM and SIGHUP within `REPEATED` seconds of the first are the same one.

What is in flight is an optimizer step or a batch of completions (`finishing`). Everywhere else
nothing would be lost, and the first signal ends the run: Ctrl-C by Python's own KeyboardInterrupt,
and on the command line SIGTERM by an exception too, so that locks, worker processes and patches are
undone on the way out (`ending`).
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


UNWINDING = 10.0  # seconds for everything that is open to be closed


REPEATED = 5.0


logger = logging.getLogger(__name__)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP asked for the end; the exit code is the shells' for it, 143 or 129."""

    def __init__(self, message: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.code = 128 + signum


def _end(signum: int, message: str) -> BaseException:
    return KeyboardInterrupt(message) if signum == signal.SIGINT else Terminated(message, signum)


def _is_repeated(signum: int, first: float) -> bool:
    return signum != signal.SIGINT and time.monotonic() - first < REPEATED


class Stop:
    """Whether the end was asked for (the signal, or None), and what is saved by then, for the
    message.
    """

    asked: signal.Signals | None = None
    saved: str = "everything that was finished is on disk"


@contextlib.contextmanager
def finishing(step: str) -> Iterator[Stop]:
    """Inside, the first signal only sets `asked`: the loop inside ends after the step in flight,
    and this raises on leaving.

    A second one does what it did before: Ctrl-C stops at once. In other threads than the main one,
    where Python sets no handlers, and for signals that the process was started to ignore,
    everything stays as it is.

    Args:
        step: what is in flight, for the message.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the message says what is saved.
        Terminated: the same by SIGTERM or SIGHUP.
    """
    stop, received = Stop(), []  # by this process; another one may have set `asked`

    def ask(signum: int, frame: object) -> None:
        if not received:
            received.append(time.monotonic())
            if stop.asked is None:
                stop.asked = signal.Signals(signum)
                logger.warning(
                    "\n%s: %s is finished and saved first; once more: at once.",
                    stop.asked.name,
                    step,
                )
        elif not _is_repeated(signum, received[0]):
            signal.signal(signum, before[signum])
            signal.raise_signal(signum)

    with _handlers(ask) as before:
        yield stop
    if stop.asked is not None:
        raise _end(stop.asked, f"stopped by {stop.asked.name}; {stop.saved}")


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """For a command: inside, a signal raises KeyboardInterrupt or Terminated, and a second one ends
    the process on the spot.

    An exception may get lost: Python drops those in callbacks of its garbage collector, where a
    program that frees models is often (then it is raised again), and bare excepts in libraries take
    one for a missing package (then, after `UNWINDING` seconds, the process ends anyway).
    """
    asked: list[int] = []
    began = 0.0
    report = sys.unraisablehook

    def end(signum: int, frame: object) -> None:
        nonlocal began
        if not asked:
            began = time.monotonic()
            asked.append(signum)
            rise()
        elif not _is_repeated(signum, began):
            os._exit(128 + signum)

    def rise(*_: object) -> None:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + asked[0]))
        signal.setitimer(signal.ITIMER_REAL, UNWINDING)
        raise _end(asked[0], f"stopped by {signal.Signals(asked[0]).name}")

    def dropped(unraisable: "sys.UnraisableHookArgs") -> None:
        if asked and isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
            signal.signal(signal.SIGALRM, rise)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            report(unraisable)

    with _handlers(end):
        sys.unraisablehook = dropped
        try:
            yield
        finally:
            if asked:
                signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = report


def allow(seconds: float) -> None:
    """While `ending` unwinds: this many seconds from now on instead of `UNWINDING`."""
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, seconds)


@contextlib.contextmanager
def _handlers(handle: Callable[[int, object], None]) -> Iterator[dict[int, object]]:
    """Sets the handler of the signals, gives what was there, and puts it back."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    before = {s: old for s, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for signum in before:
            signal.signal(signum, handle)
        yield before
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
