"""Figures, each with its table as a CSV, and tables for a terminal.

Colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and lines differ
too.
"""

import csv
import itertools
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_unsloth.runs.progress import in_notebook
from sage_unsloth.runs.text import printable

if TYPE_CHECKING:
    from rich.table import Table

BLACK, ORANGE, BLUE, VERMILION = "#000000", "#E69F00", "#0072B2", "#D55E00"
GREEN, PINK, SKY = "#009E73", "#CC79A7", "#56B4E9"
COLOURS = (BLACK, ORANGE, BLUE, VERMILION, GREEN, PINK, SKY)
MARKERS = ("x", "s", "o", "^", "D", "v", "P")
DASHES = (":", "--", "-", "-.", "-", "--", "-.")
LINES = {
    "sft": (BLACK, "x", ":"),
    "grpo": (VERMILION, "s", "--"),
    "grpo-no-kl": (VERMILION, "^", ":"),
    "grpo-forward-kl": (VERMILION, "v", "-."),
    "grpo-forward-kl-naive": (VERMILION, "<", "-."),
    "grpo-reverse-kl": (VERMILION, ">", "-."),
    "grpo-kl-in-reward": (VERMILION, "D", "--"),
    "grpo-exact": (VERMILION, "P", "-"),
    "grpo-entropy": (VERMILION, "h", "-"),
    "sage-branch": (BLUE, "o", "-"),
    "sage-branch-reference": (BLUE, "s", "--"),
    "sage-branch-adaptive": (BLUE, "^", "-."),
    "sage-branch-exact": (BLUE, "P", ":"),
    "sage-teacher": (BLUE, "*", "-"),
    "sage-token": (SKY, "D", "-."),
    "sage-token-causal": (SKY, "s", "--"),
    "sage-token-exact": (SKY, "P", ":"),
    "sage-random": (PINK, "v", "--"),
    "bnpo": (ORANGE, "s", "--"),
    "bnpo-no-kl": (ORANGE, "^", ":"),
    "bnpo-sage-branch": (ORANGE, "o", "-"),
    "dapo": (ORANGE, "D", "-."),
    "dapo-no-kl": (ORANGE, "v", ":"),
    "dapo-sage-branch": (ORANGE, "P", "-"),
    "maxrl": (GREEN, "o", "-"),
    "nsr": (GREEN, "s", "--"),
    "w-reinforce": (GREEN, "^", "-."),
    "pkpo": (GREEN, "D", "--"),
    "maxpo": (GREEN, "v", ":"),
    "pass-at-k": (GREEN, "P", "-."),
    "rs-grpo": (GREEN, "<", ":"),
    "unlikeliness": (GREEN, ">", "--"),
    "f-grpo": (GREEN, "h", "-"),
    "ucpo": (GREEN, "*", "--"),
    "clip-cov": (PINK, "o", "-"),
    "dph-rl": (PINK, "s", "-."),
    "grpo-sft": (PINK, "D", ":"),
}
"""Model or algorithm -> colour, marker, line, in every figure. A family shares a colour."""
SPARE = [*zip(COLOURS, MARKERS, DASHES, strict=True), *itertools.product(COLOURS, "o^sDvP", "-:")]
"""For other names: the next one that is free in the figure."""
COLUMN_GAP = 2  # between the columns of a table
COLUMNS = 80  # of a table where no terminal says how wide it is, such as a log file
SHORT = 12  # characters of a cell that is not broken, such as "first 10"
GLUE = "\ue000"  # stands for the blanks of such a cell while rich breaks the others


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


def error_bars(result: Iterable[Mapping[str, float]]) -> list[list[float]]:
    """Distances below and above each mean, for matplotlib's `errorbar`."""
    result = list(result)
    return [
        [item["mean"] - item["low"] for item in result],
        [item["high"] - item["mean"] for item in result],
    ]


def line_styles(names: Iterable[str], first: int = 0) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each name in a figure, for matplotlib.

    The first word of a name is looked up in `LINES`: "GRPO", "sage-branch beta=0.1", "maxrl - grpo"
    (a difference, drawn as its first part). A second line with the same word shares its colour;
    other names get the first free ones of `SPARE`.

    Args:
        names: in drawing order.
        first: number of `SPARE` to skip, for names that the figure does not show.
    """
    words = {name: re.split(r"[ ,]", name.casefold(), maxsplit=1)[0] for name in names}
    known = {LINES[word] for word in words.values() if word in LINES}
    spare = iter([look for look in SPARE if look not in known][first:] + SPARE * len(words))
    result, drawn = {}, set()
    for place, (name, word) in enumerate(words.items()):
        if word not in LINES:
            look = next(spare)
        elif (look := LINES[word]) in drawn:
            others = ((look[0], *other) for other in itertools.product(MARKERS, ("-", ":", "--")))
            look = next(other for other in others if other not in drawn)
        drawn.add(look)
        result[name] = dict(zip(("color", "marker", "linestyle"), look, strict=True))
        # A broken line lies over the solid one that it coincides with.
        result[name]["zorder"] = 2 + 1 / (1 + place)
    return result


def save_figure(
    figure, axes, path: str | Path, rows: Sequence[Mapping], note: str, dpi: int = 130
) -> Path:
    """The PNG, with the legend of all axes above, the note below, and a CSV of `rows`."""
    named = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    # About 13 letters fit in an inch; a line's sample takes five.
    longest = max((len(label) for label in named), default=0) + 5
    columns = max(1, min(len(named), int(figure.get_figwidth() * 13 / longest)))
    figure.legend(
        named.values(), named.keys(), loc="outside upper center", ncols=columns, frameon=False
    )
    figure.supxlabel(note, fontsize=8, color="#555555")
    path = Path(path)
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=dpi)
    return path


def table_text(rows: Sequence[Mapping], width: int | None = None) -> str:
    """Rows with the same columns as a plain table for a terminal or a log.

    In a table wider than `width` columns, cells of several words are broken over lines, but a
    number stays with its interval. If that is not enough, the remaining columns follow below, next
    to the first ones that identify the rows. None is the width of the terminal, or `COLUMNS`
    without one.
    """
    from rich.console import Console

    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else COLUMNS

    # Everything that rich would guess from the environment is set: a notebook, colours, the width.
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False)
    cells = [
        {name: _keep_on_one_line(printable(str(row[name]))) for name in rows[0]} for row in rows
    ]
    with console.capture() as captured:
        for number, names in enumerate(_blocks(cells, width)):
            console.print(*([""] if number else []), _table(cells, names, width), sep="\n")
    text = captured.get().replace(GLUE, " ")
    return "\n".join(line.rstrip() for line in text.splitlines())


def _keep_on_one_line(text: str) -> str:
    return text.replace(" ", GLUE) if len(text) <= SHORT else text


def _table(rows: Sequence[Mapping[str, str]], names: Sequence[str], width: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0))
    for name, column in zip(names, _widths(rows, names, width), strict=True):
        table.add_column(Text(name), overflow="fold", width=column)
    for row in rows:
        # Text is shown as it is: what a model wrote is no markup of rich, which "[red]" would be.
        table.add_row(*(Text(row[name]) for name in names))
    return table


def _widths(rows: Sequence[Mapping[str, str]], names: Sequence[str], width: int) -> list[int]:
    """Widths of the columns: of the cells, or else the widest are narrowed, to their longest part
    at most.
    """
    from rich.cells import cell_len

    texts = {name: [name, *(row[name] for row in rows)] for name in names}
    lines = {name: [line for text in texts[name] for line in text.splitlines()] for name in names}
    widths = {name: max(map(cell_len, lines[name])) for name in names}
    least = {name: max(map(cell_len, _parts(texts[name]))) for name in names}
    while sum(widths.values()) + COLUMN_GAP * (len(names) - 1) > width:
        narrowable = [name for name in names if widths[name] > least[name]]
        if not narrowable:  # what no line holds is broken anywhere
            narrowable = [name for name in names if widths[name] > 1]
        if not narrowable:
            break
        widths[max(narrowable, key=lambda name: widths[name])] -= 1
    return list(widths.values())


def _blocks(rows: Sequence[Mapping[str, str]], width: int) -> list[list[str]]:
    """The columns of each part of a table, in parts that fit into `width`."""
    from rich.cells import cell_len

    names = list(rows[0])
    least = {n: max(map(cell_len, _parts([n, *(row[n] for row in rows)]))) for n in names}
    keys = names[:1]
    for count in range(1, len(names)):
        if len({tuple(row[name] for name in names[:count]) for row in rows}) == len(rows):
            keys = names[:count]
            break
    blocks = [keys]
    for name in names[len(keys) :]:
        block = [*blocks[-1], name]
        if (
            sum(least[n] for n in block) + COLUMN_GAP * (len(block) - 1) <= width
            or blocks[-1] == keys
        ):
            blocks[-1] = block
        else:
            blocks.append([*keys, name])
    return blocks


def _parts(texts: list[str]) -> list[str]:
    """The unbreakable parts of a column: words, or whole cells "mean [low, high]"."""
    if any(text.endswith("]") for text in texts):
        return texts
    return [word for text in texts for word in text.split() or [""]]


def table_html(rows: Sequence[Mapping]) -> str:
    """Rows with the same columns as an HTML table, for a notebook."""

    def line(tag: str, cells: Iterable[Any]) -> str:
        parts = (
            f'<{tag} style="text-align: left">{escape(printable(str(cell)))}</{tag}>'
            for cell in cells
        )
        return f"<tr>{''.join(parts)}</tr>"

    head = line("th", rows[0])
    body = "".join(line("td", (row[name] for name in rows[0])) for row in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def show_table(rows: Sequence[Mapping], title: str = "") -> None:
    """Prints rows as a table below a title; in a notebook shows it as HTML."""
    if title:
        print(f"\n{title}")
    if not in_notebook():
        print(table_text(rows))
        return
    from IPython.display import display

    display({"text/html": table_html(rows), "text/plain": table_text(rows)}, raw=True)
