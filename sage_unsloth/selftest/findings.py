"""What a check finds, as a row of the table and of `selftest.json`."""

import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.runs.text import printable, without_secrets

PASSED, FAILED, NOT_HERE, NOT_RUN = "passed", "FAILED", "not here", "not run"
STATUSES = (PASSED, FAILED, NOT_HERE, NOT_RUN)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row.

    Attributes:
        check: of which check; the process around it fills it in.
        name: what was looked at.
        status: one of `STATUSES`.
        found: one sentence.
        remedy: what to do; empty where nothing is to be done.
        seconds: that it took; None where it was not run.
        figures: what was measured, for a reader of the file.
    """

    check: str = ""
    name: str
    status: str
    found: str
    remedy: str = ""
    seconds: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, good: bool, *, name: str, found: str, remedy: str, figures: dict[str, Any]
    ) -> "Finding":
        """What was measured and is `good`, or else failed, with its remedy."""
        status, remedy = (PASSED, "") if good else (FAILED, remedy)
        return cls(name=name, status=status, found=found, remedy=remedy, figures=figures)

    def row(self) -> dict[str, Any]:
        """As it is written, without the paths and secrets of this machine."""
        return without_places(asdict(self))


def without_places(value: Any) -> Any:
    """The value with no secret, and no path of this machine, in any text within it."""
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(item) for item in value]
    if not isinstance(value, str):
        return value
    value = printable(without_secrets(value))
    for place, name in _places():
        value = value.replace(place, name)
    # A home folder that is not this process's own.
    return re.sub(r"(?<![\w.])/(home|Users)/[^/\s:'\"]+", "~", value)


def _places() -> list[tuple[str, str]]:
    """Folders and what stands for them, the longest first."""
    package = Path(__file__).resolve().parents[1]
    named = {
        str(package): "sage_unsloth",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        tempfile.gettempdir(): "<tmp>",
        os.path.expanduser("~"): "~",
        str(Path.cwd()): ".",
    }
    return sorted(
        ((place, name) for place, name in named.items() if len(place) > 1),
        key=lambda item: -len(item[0]),
    )
