"""What a benchmark leaves: `records.json`, `report.json`, `report.md` and the figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.lab.evidence.design import BenchmarkConfig
from sage_unsloth.lab.evidence.figures import draw
from sage_unsloth.lab.evidence.records import Records, collect
from sage_unsloth.lab.evidence.report import make_report
from sage_unsloth.lab.evidence.text import markdown, summary
from sage_unsloth.runs.files import write_json, write_text


def publish(out: Path, config: BenchmarkConfig) -> dict[str, Any]:
    """Collect, report, draw and print; returns the report."""
    data = collect(out, config)
    report = publish_records(data, out)
    print(
        f"\n{summary(report)}\n\nWritten to {out}: records.json, report.json, report.md, figures "
        "with their tables"
    )
    print(
        f"Next: look at {out / 'report.md'}; completions are in {out / 'samples'}; more seeds or "
        "algorithms: the same command with them"
    )
    return report


def publish_records(data: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """`records.json`, `report.json`, `report.md` and the figures, in a folder that exists."""
    report = make_report(data)
    _write_compact(out / "records.json", data)
    write_json(out / "report.json", report)
    write_text(out / "report.md", markdown(report))
    draw(report, Records(data), out)
    return report


def _write_compact(path: Path, data: Mapping[str, Any]) -> None:
    """JSON with a line for each run, so that a thousand numbers are not a thousand lines."""
    head = {key: value for key, value in data.items() if key != "runs"}
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in data["runs"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n"
    write_text(path, text)
