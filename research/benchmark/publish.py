"""What a benchmark leaves: `records.json`, `report.json`, `report.md` and the figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.benchmark.design import BenchmarkConfig
from research.benchmark.figures import draw
from research.benchmark.records import Records, collect
from research.benchmark.report import make_report
from research.benchmark.text import markdown
from sage_unsloth.runs.files import write_json, write_text
from sage_unsloth.study.records import write_records


def publish(out: Path, config: BenchmarkConfig) -> dict[str, Any]:
    """Collect, report and draw; returns the report.

    Raises:
        ValueError: the SFT model or every seed is incomplete.
    """
    return publish_records(collect(out, config), out)


def publish_records(data: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """`records.json`, `report.json`, `report.md` and the figures, in a folder that exists."""
    report = make_report(data)
    write_records(out / "records.json", data)
    write_json(out / "report.json", report)
    write_text(out / "report.md", markdown(report))
    draw(report, Records(data), out)
    return report
