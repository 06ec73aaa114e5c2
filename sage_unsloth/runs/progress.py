"""Progress of long loops: a bar on a terminal or in a notebook, occasional lines elsewhere."""

import sys
import time
from collections.abc import Iterable
from typing import Any

BETWEEN_LINES = 30.0
"""Seconds between lines if the output is not a terminal."""


def progress(iterable: Iterable | None = None, **options: Any) -> Any:
    """A bar of tqdm; in a file or pipe whole lines, at least `BETWEEN_LINES` seconds apart.

    Args:
        iterable: None for a bar that is advanced by `update`.
        options: tqdm's: `total`, `initial`, `desc`, `unit`, `disable`.
    """
    if sys.stderr.isatty() or in_notebook():
        from tqdm.auto import tqdm

        return tqdm(iterable, **options)
    return _lines()(iterable, ncols=0, **options)  # 0: no bar beside the numbers


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _lines() -> type:
    """The class of bars that write lines; imports tqdm on first use."""
    from tqdm import tqdm

    class Lines(tqdm):
        written: tuple[float, int] | None = None  # when, and at which count

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and (
                self.written is None or time.monotonic() - self.written[0] >= BETWEEN_LINES
            ):
                self._write()

        def close(self) -> None:
            if not self.disable and self.written is not None and self.written[1] != self.n:
                self._write()
            self.leave = False  # there is nothing to draw again
            super().close()

        def _write(self) -> None:
            self.written = time.monotonic(), self.n
            self.fp.write(f"{self}\n")
            self.fp.flush()

    return Lines
