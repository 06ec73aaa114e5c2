"""Figures, each drawn from a table that is saved beside it: a PNG for looking, a CSV for anything
else.

Colours are Okabe and Ito's, told apart by colour-blind readers; line styles differ too.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_unsloth.runs.text import printable

COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")


STYLES = (":", "--", "-", "-.", "-", "--", "-.")


MARKERS = ("x", "s", "o", "^", "D", "v", "P")


def write_table(path: str | Path, rows: Sequence[Mapping]) -> Path:
    """A CSV of the rows; columns in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path = Path(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def new_figure(panels: int):
    """A figure of `panels` axes, two in a row, and the axes that are used."""
    from matplotlib.figure import Figure

    rows = -(-panels // 2)
    figure = Figure(figsize=(10, 3.6 * rows), layout="constrained")
    grid = figure.subplots(rows, min(panels, 2), squeeze=False).flatten()
    for axis in grid:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid[panels:]:
        axis.set_axis_off()
    return figure, grid[:panels]


def save_figure(
    figure, axes, path: str | Path, rows: Sequence[Mapping], note: str, dpi: int = 130
) -> Path:
    """The PNG, with the legend of its first axes above and the note below, and `rows` as a CSV
    beside it.
    """
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.supxlabel(note, fontsize=8, color="#555555")
    path = Path(path)
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=dpi)
    return path


def show_table(rows: Sequence[Mapping]) -> None:
    """Print rows of one shape as a plain table."""
    header = list(rows[0])
    table = [header, *([printable(str(row[key])) for key in header] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
