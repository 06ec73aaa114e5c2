"""A result of a check: a row of the table and of `selftest.json`."""

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
        check: its name, set by the process around it.
        name: the tested property.
        status: one of `STATUSES`.
        found: one sentence.
        remedy: the fix, or "".
        seconds: duration; None if it was not run.
        figures: measurements, for a reader of the file.
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
        """A passed finding if `good`, else a failed one with its remedy."""
        status, remedy = (PASSED, "") if good else (FAILED, remedy)
        return cls(name=name, status=status, found=found, remedy=remedy, figures=figures)

    def row(self) -> dict[str, Any]:
        """The row for the file, without paths and secrets of this machine."""
        return without_places(asdict(self))


def without_places(value: Any) -> Any:
    """The value without secrets and paths of this machine in its texts."""
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
    """Folders and their placeholders, the longest first."""
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
