"""The whole self-test: its table, and `selftest.json`, which a user can send."""

import platform
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.planning.memory import GIB
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import environment
from sage_unsloth.selftest.checks import Check, all_checks
from sage_unsloth.selftest.findings import FAILED, NOT_RUN, STATUSES, without_places
from sage_unsloth.selftest.process import run_in_process

TIME_LIMIT = 600.0  # of one call
WIDTH = 80


def run_selftest(
    file: str | Path,
    *,
    again: bool = False,
    seconds: float = TIME_LIMIT,
    checks: Sequence[Check] | None = None,
    print_line: Callable[[str], None] = print,
) -> int:
    """Runs what has not passed yet, and returns the number of failed findings.

    The file is written after each check. A second call on the same machine and versions keeps what
    passed or is not possible there, and runs the rest.

    Args:
        again: run everything, whatever the file says.
        seconds: time limit: no check starts after it, and a running one is stopped.
        checks: None runs all.
        print_line: shows a line of the table.

    Raises:
        ValueError: another process writes to the file, or it holds something else.
    """
    file, ends = Path(file), time.monotonic() + seconds
    checks = all_checks() if checks is None else checks
    report: dict[str, Any] = {"machine": machine(), "environment": _environment(), "findings": []}
    with exclusive_lock(file):
        selected = [] if again else _reusable_rows(file, report, print_line)
        print_line(f"Self-test: at most {seconds / 60:.0f} minutes. Ctrl-C keeps what is done.\n")
        print_line(f"{'':<9}{'':<32}{'s':>6}")
        for number, check in enumerate(checks, 1):
            rows = [row for row in selected if row["check"] == check.name]
            if not rows:
                findings = run_in_process(check, ends - time.monotonic())
                rows = [finding.row() for finding in findings]
            for row in rows:
                _show(row, print_line)
            report["findings"] += rows
            # What an earlier call found of checks that were not reached yet stays in the file.
            left = {later.name for later in checks[number:]}
            kept = [row for row in selected if row["check"] in left]
            write_json(file, report | {"findings": report["findings"] + kept})
    counts = Counter(row["status"] for row in report["findings"])
    summary = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    print_line(f"\n{summary}. {file} can be sent: it names no path and no secret")
    return counts[FAILED]


def machine() -> dict[str, Any]:
    """The machine of the measurements."""
    import torch

    from sage_unsloth.models.meter import device_name

    result: dict[str, Any] = {"device": device_name(), "processor": platform.machine()}
    if has_gpu():
        properties = torch.cuda.get_device_properties(0)
        result |= {
            "memory_gib": round(properties.total_memory / GIB, 2),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cards": torch.cuda.device_count(),
        }
    return result


def _environment() -> dict[str, Any]:
    return without_places(environment())


def _reusable_rows(
    file: Path, report: dict[str, Any], print_line: Callable[[str], None]
) -> list[dict]:
    """The rows of checks that need not run again."""
    if not file.exists():
        return []
    before = read_json(file)
    if not {"machine", "environment", "findings"} <= before.keys():
        raise ValueError(f"{file} must be the record of a self-test, but is another file")

    def same(result: dict[str, Any]) -> list[Any]:
        return [result["machine"], *(result["environment"].get(k) for k in ("packages", "commit"))]

    if same(before) != same(report):
        print_line("Another machine or other versions than those of the record: all runs anew.")
        return []
    open_checks = {r["check"] for r in before["findings"] if r["status"] in (FAILED, NOT_RUN)}
    return [row for row in before["findings"] if row["check"] not in open_checks]


def _show(row: dict[str, Any], print_line: Callable[[str], None]) -> None:
    seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
    print_line(f"{row['status']:<9}{row['name']:<32}{seconds:>6}".rstrip())
    for text, mark in ((row["found"], "  "), (row["remedy"], "->")):
        for line in textwrap.wrap(text, WIDTH - 12):
            print_line(f"{'':<9}{mark} {line}")
            mark = "  "
