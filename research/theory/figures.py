"""Figures of the theory: curves labelled at their ends, anchors, the border of Theorem 4.3."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_unsloth.figures import BLACK, BLUE, GREEN, SKY, VERMILION, line_styles, write_table

GREY = "#555555"


@dataclass(frozen=True)
class Curve:
    """y against x, with a band if `low` and `high` are given."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def __post_init__(self) -> None:
        sizes = {len(v) for v in vars(self).values() if v is not None}
        if len(sizes) != 1 or 0 in sizes or (self.low is None) != (self.high is None):
            raise ValueError(
                "a curve needs x and y of one length >= 1, and both ends of a band or neither, "
                f"got { ({k: None if v is None else len(v) for k, v in vars(self).items()}) }"
            )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title, xlabel, ylabel: with units.
        curves: label -> curve, in the order of colours.
        log: which axes are logarithmic: "", "x", "y" or "xy".
        labels: "end" of each curve, or a "legend" above, for curves that end in one place.
        ylim: limits of y; None lets the data decide.
    """

    title: str
    xlabel: str
    ylabel: str
    curves: Mapping[str, Curve]
    log: str = ""
    labels: str = "end"
    ylim: tuple[float, float] | None = None


def plot_curves(panels: Sequence[Panel], path: str | Path, note: str) -> Path:
    """The panels beside each other. Where curves coincide, the first lies on top.

    Args:
        path: of the PNG; the CSV is written beside it.
        note: the conditions, under the figure.
    """
    figure, axes = _figure(len(panels))
    rows = []
    for axis, panel in zip(axes, panels, strict=True):
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        styles = line_styles(panel.curves)
        for number, (label, curve) in enumerate(panel.curves.items()):
            style = styles[label]
            few = len(curve.x) <= 12
            axis.plot(
                curve.x,
                curve.y,
                color=style["color"],
                linestyle=style["linestyle"],
                linewidth=1.8,
                zorder=20 - number,
                marker=style["marker"] if few else None,
                markersize=5,
                label=label,
            )
            if curve.low is not None:
                axis.fill_between(
                    curve.x, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0
                )
            band = [None] * len(curve.x)
            rows += [
                {"panel": panel.title, "curve": label, "x": x, "y": y, "low": low, "high": high}
                for x, y, low, high in zip(
                    curve.x, curve.y, curve.low or band, curve.high or band, strict=True
                )
            ]
        if "x" in panel.log:
            axis.set_xscale("log")
            first = next(iter(panel.curves.values()))
            if len(first.x) <= 12:
                axis.set_xticks(first.x, [f"{x:g}" for x in first.x], minor=False)
                axis.set_xticks([], minor=True)
        if "y" in panel.log:
            axis.set_yscale("log")
        if panel.ylim:
            axis.set_ylim(panel.ylim)
        if panel.labels == "end":
            _label_ends(axis, panel.curves)
        else:
            axis.legend(
                loc="lower center", bbox_to_anchor=(0.5, 1.07), ncols=2, frameon=False, fontsize=8.5
            )
    return _save(figure, path, rows, note)


def plot_anchors(panels: Mapping[str, Sequence[Mapping]], path: str | Path, note: str) -> Path:
    """From reference to optimum, one panel for each guide, one line for each completion.

    Args:
        panels: guide -> rows with `completion`, `right` (bool), `q`, `reference`, `anchor`,
            `plain`, `guided` (probabilities).
        path: of the PNG; the CSV is written beside it.
        note: the conditions, under the figure.
    """
    names = {
        "reference": "π_ref",
        "anchor": "q·π_ref, normalised",
        "plain": "optimum, Eq. 2",
        "guided": "optimum, Eq. 4",
    }
    figure, axes = _figure(len(panels), height=4.6)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        places = range(len(rows), 0, -1)
        styles = line_styles(names.values())
        for number, (key, name) in enumerate(names.items()):
            style = styles[name]
            # Reference and anchor above the line, the optima below it, so that equal values stay
            # apart.
            shift = (0.24, 0.08, -0.08, -0.24)[number]
            axis.plot(
                [row[key] for row in rows],
                [p + shift for p in places],
                linestyle="none",
                marker=style["marker"],
                color=style["color"],
                markersize=6,
                label=name,
            )
        axis.set_yticks(
            list(places), [f"{row['completion']}{'  ✓' if row['right'] else ''}" for row in rows]
        )
        for place, row in zip(places, rows, strict=True):
            axis.annotate(
                f"q = {row['q']:.3f}",
                (1.02, place),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
            )
        axis.set_xscale("log")
        axis.set(title=title, xlabel="probability of the completion")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    table = [{"guide": title} | dict(row) for title, rows in panels.items() for row in rows]
    return _save(figure, path, table, note)


def plot_border(rows: Sequence[Mapping], delta: float, path: str | Path, note: str) -> Path:
    """Theorem 4.3: the lift q(y*)/E[q] against π_RLVR(y*), and the border lift = δ/π_RLVR(y*).

    Args:
        rows: of `support.search_trees`.
        delta: δ of the search.
        path: of the PNG; the CSV is written beside it.
        note: the conditions, under the figure.
    """
    figure, (axis,) = _figure(1, width=8.2, height=4.4)
    groups = {
        "stays outside": (False, False),
        "brought in": (False, True),
        "pushed out": (True, False),
        "stays inside": (True, True),
    }
    lifts = [row["lift"] for row in rows]
    left = 1e-4
    for number, (name, kind) in enumerate(groups.items()):
        of = [row for row in rows if (row["inside_before"], row["inside_after"]) == kind]
        axis.scatter(
            [max(row["plain"], left) for row in of],
            [row["lift"] for row in of],
            color=(SKY, BLUE, VERMILION, GREEN)[number],
            marker=("o", "^", "v", "s")[number],
            s=36 if number in (1, 2) else 7,
            zorder=3 if number in (1, 2) else 1,
            label=f"{name} ({len(of)})",
        )
    low, high = min(lifts) - 0.05, max(lifts) + 0.05
    border = [low + (high - low) * i / 200 for i in range(201)]
    axis.plot(
        [delta / y for y in border],
        border,
        color=BLACK,
        linewidth=1.4,
        label="border: lift = δ / π_RLVR(y*)",
    )
    axis.axhline(1, color=GREY, linewidth=0.8)
    axis.set_xscale("log")
    axis.set(
        xlim=(left * 0.8, 1.2),
        ylim=(low, high),
        xlabel="π_RLVR(y*), Eq. 2 (smaller values at the left edge)",
        ylabel="lift q(y*) / E[q]",
    )
    figure.legend(loc="outside right upper", frameon=False)
    return _save(figure, path, rows, note)


def _figure(panels: int, *, width: float | None = None, height: float = 4.0):
    """A figure of `panels` axes in one row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width or (7.2, 11.5, 13.5)[panels - 1], height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False).flatten()
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _label_ends(axis, curves: Mapping[str, Curve], gap: float = 0.075) -> None:
    """Labels right of the axes at the curves' ends, `gap` of the axes' height apart at least."""
    to_axes = axis.transData + axis.transAxes.inverted()
    ends = []
    styles = line_styles(curves)
    for label, curve in curves.items():
        x, y = to_axes.transform((curve.x[-1], curve.y[-1]))
        ends.append((min(max(y, 0.0), 1.0), x, label))
    ends.sort()
    places: list[float] = []
    for y, *_ in ends:
        places.append(y if not places else max(y, places[-1] + gap))
    places[-1] = min(places[-1], 1.0)
    # Those below give way in their turn.
    for i in reversed(range(len(places) - 1)):
        places[i] = min(places[i], places[i + 1] - gap)
    for (y, x, label), place in zip(ends, places, strict=True):
        colour = styles[label]["color"]
        axis.plot(
            [x, 1.04],
            [y, place],
            transform=axis.transAxes,
            color=colour,
            linewidth=0.7,
            clip_on=False,
        )
        axis.annotate(label, (1.05, place), xycoords="axes fraction", va="center", fontsize=8.5)


def _save(figure, path: str | Path, rows: Sequence[Mapping], note: str) -> Path:
    figure.supxlabel(note, fontsize=8, color=GREY)
    path = Path(path)
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)
    return path
