"""What a guide costs, as tables and a figure."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.cost.figures import plot_costs
from sage_unsloth.runs.files import write_json

BASELINE = "grpo"
REPORT = "bench.json"  # the name from before the command was called `cost`


def write_report(report: dict[str, Any], folder: Path) -> None:
    """`bench.json`, `bench.png` and `bench.csv`."""
    write_json(folder / REPORT, report)
    rows = [row for row in report["loss"] if row["seconds"] is not None]
    table = [
        {
            name: row[name]
            for name in ("length", "hidden", "vocabulary", "batch", "variant", "peak_mib")
        }
        | {"seconds": statistics.median(row["seconds"])}
        | row["ratio"]
        for row in rows
    ]
    plot_costs(table, folder / "bench.png", conditions(report))


def quartiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = middle = high = values[0]
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def conditions(report: dict[str, Any]) -> str:
    """One line: device, threads, versions, date."""
    environment = report["environment"]
    backend = report["settings"].get("backend", "unsloth")
    names = [name for name in ("unsloth", "trl", "torch") if backend != "trl" or name != "unsloth"]
    packages = ", ".join(f"{name} {environment['packages'][name]}" for name in names)
    threads = "" if "cores" not in report["device"] else f", {report['threads']} thread(s)"
    compiled = "compiled" if report["compiled"] else "not compiled"
    return f"{report['device']}{threads}; {packages}, {compiled}; {environment['date'][:10]}"


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(report: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Title -> rows to show."""
    result = {
        "Loss and backward pass": loss_table(report),
        "Optimizer step": step_table(report),
        "Growth": growth_table(report),
    }
    return {title: rows for title, rows in result.items() if rows}


def loss_table(report: dict[str, Any]) -> list[dict[str, str]]:
    """Rows to show: seconds, ratio with its quartiles, memory, of every size and variant."""
    base = {_size_of(r): r for r in report["loss"] if r["variant"] == BASELINE}
    rows = []
    for row in report["loss"]:
        head = {"T": f"{row['length']:,}", "H": f"{row['hidden']:,}", "variant": row["variant"]}
        if row["seconds"] is None:
            rows.append(
                head
                | dict.fromkeys(
                    ("seconds", "x grpo", "quartiles", "x grpo, CPU time", "peak MiB", "x grpo's"),
                    "not fitting",
                )
            )
            continue
        ratio, peak = row["ratio"], row["peak_mib"]
        peak_ratio = "" if not peak else f"{peak / base[_size_of(row)]['peak_mib']:.2f}"
        rows.append(
            head
            | {
                "seconds": f"{statistics.median(row['seconds']):.3g}",
                "x grpo": f"{ratio['median']:.2f}",
                "quartiles": f"{ratio['low']:.2f}-{ratio['high']:.2f}",
                "x grpo, CPU time": _on_a_cpu(report, row["cpu_ratio"]),
                "peak MiB": "" if peak is None else f"{peak:,.0f}",
                "x grpo's": peak_ratio,
            }
        )
    return rows


def versions_table(reports: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """CPU time and memory beside the baseline's, of reports with the same variants."""
    rows = []
    for number, first in enumerate(reports[0]["loss"]):
        row = {"loss": first["variant"]}
        for report in reports:
            base, other = report["loss"][0], report["loss"][number]
            version = report["environment"]["packages"]["unsloth"]
            ratio = other["cpu_ratio"]
            row[f"{version}, CPU time"] = (
                f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
            )
            row[f"{version}, memory"] = f"{other['peak_mib'] / base['peak_mib']:.2f}"
        rows.append(row)
    return rows[1:]


def _on_a_cpu(report: dict[str, Any], ratio: dict[str, float]) -> str:
    """Where the work is on a GPU, the process's CPU time says nothing."""
    if "cores" not in report["device"]:
        return ""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _size_of(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in ("hidden", "vocabulary", "length", "batch"))


def step_table(report: dict[str, Any]) -> list[dict[str, str]]:
    """Rows to show: seconds, ratio, tokens a second and shares of the phases."""
    phases = list(dict.fromkeys(p for row in report.get("step", ()) for p in row["shares"]))
    return [
        {
            "task": row["task"],
            "variant": row["variant"],
            "seconds": f"{statistics.median(row['seconds']):.3g}",
            "x grpo": f"{row['ratio']['median']:.2f}",
            "quartiles": f"{row['ratio']['low']:.2f}-{row['ratio']['high']:.2f}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
        }
        | {phase: f"{row['shares'].get(phase, 0):.1%}" for phase in phases}
        for row in report.get("step", ())
    ]


def growth_table(report: dict[str, Any]) -> list[dict[str, str]]:
    """Rows to show: what grows, and what it costs."""
    return [
        {
            "grows": row["grows"],
            "to": f"{row['value']:,}",
            "variant": row["variant"],
            "seconds": "not fitting" if row["seconds"] is None else f"{min(row['seconds']):.3g}",
            "peak MiB": "" if row.get("peak_mib") is None else f"{row['peak_mib']:,.0f}",
        }
        for row in report.get("growth", ())
    ]
