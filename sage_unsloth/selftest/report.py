"""The record of a self-test as Markdown, for a bug report or as a table row."""

from collections import Counter
from typing import Any

from sage_unsloth.runs.text import markdown_table
from sage_unsloth.selftest.findings import FAILED, STATUSES

VERSIONS_SHOWN = ("torch", "unsloth", "unsloth_zoo", "trl", "transformers", "bitsandbytes", "vllm")
"""Packages whose versions start a report."""
GPU_COLUMNS = (
    "GPU",
    "versions",
    "checks",
    "guided step, time",
    "guided step, memory",
    "update: measured of planned",
    "commit",
)


def markdown_report(report: dict[str, Any]) -> str:
    """The text that `doctor --deep` prints, from the content of `selftest.json`."""
    of = report["environment"]
    lines = [
        "### Self-test",
        "",
        f"- GPU: {describe_gpu(report['machine'])}",
        f"- Python {of['python']}, {_versions(of)}",
        f"- commit {of.get('commit') or 'none (installed as a package)'}, {of.get('date')}",
        f"- {_counts(report)}",
        "",
        markdown_table(
            [
                ("", "result", "seconds", "found"),
                *(
                    (
                        _cell(row["name"]),
                        row["status"],
                        "" if row["seconds"] is None else f"{row['seconds']:.0f}",
                        _cell(row["found"]),
                    )
                    for row in report["findings"]
                ),
            ]
        ),
    ]
    return "\n".join(lines)


def describe_gpu(machine: dict[str, Any]) -> str:
    """Name, memory and driver of the tested device."""
    if "compute_capability" not in machine:
        return f"none ({machine['device']})"
    return (
        f"{machine['cards']} x {machine['device']}, {machine['memory_gib']:.1f} GiB, compute "
        f"capability {machine['compute_capability']}, CUDA {machine['cuda']}"
    )


def gpu_row(report: dict[str, Any]) -> tuple[str, ...]:
    """The cells of `GPU_COLUMNS`; a dash for missing rows."""
    rows = {row["name"]: row for row in report["findings"]}

    def figure(name: str, text: str) -> str:
        figures = rows.get(name, {}).get("figures") or {}
        return text.format(**figures) if figures else "–"

    gib = {
        key: value / 2**30
        for key, value in (
            rows.get("plan, activations and logits", {}).get("figures") or {}
        ).items()
    }
    update = "–"
    if gib:
        update = f"{gib['measured_bytes']:.2f} of {gib['planned_bytes']:.2f} GiB"
    return (
        describe_gpu(report["machine"]),
        _versions(report["environment"]),
        _counts(report),
        figure("guided step, time", "{ratio:.2f} × {plain:.3g} {unit}"),
        figure("guided step, memory", "{ratio:.2f} × {plain:.0f} {unit}"),
        update,
        (report["environment"].get("commit") or "–")[:7],
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _versions(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    return ", ".join(f"{name} {packages[name]}" for name in VERSIONS_SHOWN if packages.get(name))


def _counts(report: dict[str, Any]) -> str:
    counts = Counter(row["status"] for row in report["findings"])
    text = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    failed = [row["name"] for row in report["findings"] if row["status"] == FAILED]
    return f"{text} ({', '.join(failed)})" if failed else text
