"""What a frontier leaves: `records.json`, `report.json`, `report.md` and the figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.frontier.design import FrontierConfig
from research.frontier.figures import draw
from research.frontier.records import START, collect
from research.frontier.report import make_report
from research.frontier.text import markdown
from sage_unsloth.runs.files import read_json, write_json, write_text
from sage_unsloth.study.records import write_records


def publish(out: Path, config: FrontierConfig) -> dict[str, Any]:
    """Collect, report and draw; returns the report.

    Raises:
        ValueError: the SFT model or every seed is incomplete.
    """
    return publish_records(collect(out, config), out)


def publish_records(data: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """`records.json`, `report.json`, `report.md` and the figures, in a folder that exists.

    Where it has `start_model.json`, the checks use the SFT model's many samples.
    """
    start = out / START
    report = make_report(data, read_json(start) if start.exists() else None)
    write_records(out / "records.json", data)
    write_json(out / "report.json", report)
    write_text(out / "report.md", markdown(report))
    draw(report, out)
    return report
