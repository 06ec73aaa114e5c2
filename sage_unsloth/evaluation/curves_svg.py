"""Curves with bands as SVG inside a page: values on hover, on focus and by touch, without a script.

Colours are those of the page's style (`STYLE`), which knows light and dark.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sage_unsloth.evaluation.report_text import interval_text
from sage_unsloth.figures import COLOURS, line_styles
from sage_unsloth.runs.html import escape

Curve = Mapping[int, Mapping[str, Any]]
"""k -> `mean`, `low`, `high`"""

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 40
DASHES = {"-": "none", "--": "7 4", ":": "2 4", "-.": "10 3 2 3"}
LONGEST_LABEL = 24  # characters of a name beside a value

STYLE = """
:root { --c0: #1a1a1a; --c1: #b87700; --c2: #0072b2; --c3: #d55e00; --c4: #00805d; --c5: #b3578f;
  --c6: #2a86b8; }
@media (prefers-color-scheme: dark) { :root { --c0: #ececec; --c1: #e69f00; --c2: #4fa8e0; --c3:
  #f0854a; --c4: #2fbf95; --c5: #e29ac4; --c6: #8fd0f2; } }
svg { width: 100%; height: auto; display: block; font: 13px system-ui, sans-serif; }
svg text { fill: var(--text); } svg .axis { fill: var(--faint); }
.grid { stroke: var(--line); stroke-width: 1; } .zero { stroke: var(--text); }
.curve { fill: none; stroke: var(--c); stroke-width: 2; } .band { fill: var(--c); opacity: .13; }
.dot { fill: var(--c); } .hit { fill: transparent; }
.point { outline: none; } .point .value { visibility: hidden; font-weight: 600; }
.point:hover .dot, .point:focus .dot { stroke: var(--text); stroke-width: 3; }
.point:hover .value, .point:focus .value { visibility: visible; }
.graph:has(.point:hover) .about, .graph:has(.point:focus) .about { visibility: hidden; }
.legend { display: flex; gap: .2rem 1rem; flex-wrap: wrap; font-size: .85rem; margin: .3rem 0; }
@media (max-width: 32rem) { svg.graph { font-size: 17px; overflow: visible; } svg.graph .value {
  font-size: 14px; } }
.legend svg { width: 2rem; display: inline-block; vertical-align: middle; margin-right: .3rem; }
"""


def _looks(names: Iterable[str], first: int) -> dict[str, str]:
    """The colour and dashes of each curve, as an attribute."""
    return {
        name: f'style="--c: var(--c{COLOURS.index(style["color"])}); '
        f'stroke-dasharray: {DASHES[style["linestyle"]]}"'
        for name, style in line_styles(names, first).items()
    }


def legend(names: Sequence[str], first: int = 0) -> str:
    """The curves' names with what each looks like; `first` as for `figures.line_styles`."""
    items = (
        f'<span><svg viewBox="0 0 32 8" aria-hidden="true"><line class="curve" x1="0" y1="4" '
        f'x2="32" y2="4" {look}/></svg>{escape(name)}</span>'
        for name, look in _looks(names, first).items()
    )
    return f'<div class="legend">{"".join(items)}</div>'


def graph(curves: Mapping[str, Curve], about: str, *, signed: bool = False, first: int = 0) -> str:
    """Curves against k on a logarithmic axis, each with its 95 % band.

    Args:
        curves: name -> k -> estimate; a band is drawn where every k has an interval.
        about: what is shown, above the graph and for a screen reader.
        signed: differences, around 0, on the smallest scale that holds their intervals; else shares
            from 0 to 1.
        first: as for `figures.line_styles`.

    Returns:
        An `svg` element; all text is escaped.
    """
    ks = sorted({k for curve in curves.values() for k in curve})
    low, high = _scale(curves) if signed else (0.0, 1.0)
    across = math.log2(ks[-1] / ks[0]) or 1.0

    def x(k: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(k / ks[0]) / across

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [
        f'<svg class="graph" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" '
        f'aria-label="{escape(about)}"><text class="about" x="{LEFT}" y="16">{escape(about)}</text>'
    ]
    for part in range(5):
        value = low + (high - low) * part / 4
        zero = " zero" if signed and part == 2 else ""
        parts.append(
            f'<line class="grid{zero}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" '
            f'y2="{y(value):.1f}"/><text class="axis" x="{LEFT - 6}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:{"+" if signed and value else ""}.2f}</text>'
        )
    parts += [
        f'<text class="axis" x="{x(k):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{k}'
        "</text>"
        for k in ks
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">k (samples)</text>'
    )
    looks, points = _looks(curves, first), []
    for name, curve in curves.items():
        ordered = sorted(curve)
        line = [(x(k), y(curve[k]["mean"])) for k in ordered]
        if all(_has_interval(curve[k]) for k in ordered):
            lower = [(x(k), y(curve[k]["low"])) for k in ordered]
            upper = [(x(k), y(curve[k]["high"])) for k in reversed(ordered)]
            parts.append(f'<polygon class="band" {looks[name]} points="{_path(lower + upper)}"/>')
        parts.append(f'<polyline class="curve" {looks[name]} points="{_path(line)}"/>')
        points += [
            _point(name, k, curve[k], place, looks[name], "+" if signed else "")
            for k, place in zip(ordered, line, strict=True)
        ]
    return "".join([*parts, *points, "</svg>"])


def _point(
    name: str,
    k: int,
    estimate: Mapping[str, Any],
    place: tuple[float, float],
    look: str,
    sign: str,
) -> str:
    """A dot that shows its value at the top of the graph."""
    label = name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + "…"
    value = f"k = {k}: {interval_text(estimate, sign)}"
    return (
        f'<g class="point" tabindex="0" role="img" aria-label="{escape(f"{name}, {value}")}" '
        f'{look}><circle class="hit" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="11"/>'
        f'<circle class="dot" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3.5"/>'
        f'<text class="value" x="{LEFT}" y="16">{escape(f"{label}, {value}")}</text></g>'
    )


def _has_interval(estimate: Mapping[str, Any]) -> bool:
    return estimate["low"] is not None and not math.isnan(estimate["low"])


def _scale(curves: Mapping[str, Curve]) -> tuple[float, float]:
    """Symmetric around 0; a multiple of .1, so that a quarter of it is written with two digits."""
    values = [
        abs(estimate[part])
        for curve in curves.values()
        for estimate in curve.values()
        for part in (("mean", "low", "high") if _has_interval(estimate) else ("mean",))
    ]
    most = max(0.1, math.ceil(max(values) * 10 - 1e-9) / 10)
    return -most, most


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
