"""Writes the reports and figures of committed records, and the pictures of docs/method.md.

    python -m research.redraw data/results/benchmark/arithmetic data/results/frontier/*/fresh
    python -m research.redraw data/results/frontier docs/pictures

A folder with `records.json` gets `report.json`, `report.md` and its figure; that of the frontiers
the two pictures of several of them; `docs/pictures` what the guides and the theory give.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from research.evidence import pictures
from research.evidence.report import make_report, markdown
from sage_unsloth.runs.files import read_json, write_json, write_text


def redraw(folder: Path) -> None:
    """Every report and figure of a folder.

    Raises:
        ValueError: the folder has no records.
    """
    if folder.name == "pictures":
        from research.method_pictures import draw

        draw(folder)
    elif (folder / "records.json").is_file():
        report = make_report(folder)
        write_json(folder / "report.json", report)
        write_text(folder / "report.md", markdown(report))
        pictures.draw(report, folder)
    elif files := sorted(folder.glob("*/fresh/report.json")):
        reports = [read_json(file) for file in files]
        pictures.draw_crossing(reports[0], folder / "crossing.png")
        pictures.draw_verdicts(reports, folder / "verdicts.png")
    else:
        raise ValueError(f"a folder of results must have records.json, but {folder} has none")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args(arguments).folders:
        redraw(folder)


if __name__ == "__main__":
    main()
