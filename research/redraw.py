"""Draws the figures of committed results from their records.

    python -m research.redraw data/results/benchmark/arithmetic data/results/frontier/*/fresh

A folder is that of a benchmark or of a frontier, with its `records.json`, or `docs/pictures`. The
repository has the figures that stand on a page; this draws all of them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sage_unsloth.runs.files import read_json


def redraw(folder: Path) -> None:
    """Every figure of a folder of results, with its table.

    Raises:
        ValueError: the folder has no `records.json`.
    """
    if folder.name == "pictures":
        from research.method_pictures import draw as draw_pictures

        draw_pictures(folder)
        return
    records = folder / "records.json"
    if not records.is_file():
        raise ValueError(f"a folder of results must hold records.json; {folder} holds none")
    data = read_json(records)
    if "problems" in data:  # only a frontier has a pilot and fresh problems
        from research.frontier.figures import draw
        from research.frontier.report import make_report

        draw(make_report(data), folder)
        return
    from research.benchmark.figures import draw as draw_benchmark
    from research.benchmark.report import make_report as make_benchmark_report

    draw_benchmark(make_benchmark_report(data), folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args(arguments).folders:
        redraw(folder)


if __name__ == "__main__":
    main()
