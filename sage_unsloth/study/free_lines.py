"""Lines in the plane of pass@1 and pass@k that cost no training, and the points above all of them.

    mixture        m of k attempts by the start model: switching a LoRA off is free
    scale          the baseline's LoRA times a factor
    temperature    the baseline at a higher temperature
    early          the baseline after fewer steps

A method that is not above these has gained nothing. The line of the baseline's other strengths
costs training but needs no new method, so it is one of them. Of the lines with a value at the
method's pass@1 the highest counts: their upper envelope. The highest of several estimates is biased
upwards, so "above" is conservative.

A line is interpolated between neighbours at most a factor `LARGEST_STEP` apart, and has no value
beyond its ends.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sage_unsloth.study.chord import LARGEST_STEP, Place, distance_to_chord
from sage_unsloth.study.crossed import CrossedEstimate
from sage_unsloth.study.plan import EARLY, SCALE, TEMPERATURE
from sage_unsloth.study.points import START
from sage_unsloth.study.records import Tables

MIXTURE, STRENGTH = "mixture", "strength"
TITLES = {
    MIXTURE: "some attempts by the start model",
    SCALE: "a scaled LoRA",
    TEMPERATURE: "another temperature",
    EARLY: "an early checkpoint",
    STRENGTH: "another strength of the baseline",
}


@dataclass(frozen=True)
class LineNode:
    """A place on a line: its label, its position, and pass@1 and pass@k."""

    label: str
    position: float
    place: Place


def free_lines(tables: Tables, k: int, strengths: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Line -> its nodes in order of position, at k.

    Args:
        tables: of a benchmark.
        k: of pass@k, > 1.
        strengths: (value, point) of the baseline's line over its own strength.
    """
    baseline = tables.place(tables.baseline, k)
    lines = {
        # Neighbouring mixtures differ by one attempt: the position is not a strength.
        MIXTURE: [
            LineNode(f"{m} of {k} by the start model", m, tables.mixture(m, k)) for m in range(k)
        ]
        + [LineNode(START, k, tables.place(START, k))]
    }
    for kind in (SCALE, TEMPERATURE, EARLY):
        places = tables.variant_places(kind, k)
        if not places:
            continue
        nodes = [LineNode(f"{kind} {value:g}", value, place) for value, place in places.items()]
        nodes.append(LineNode(tables.baseline, _own_position(tables, kind), baseline))
        lines[kind] = sorted(nodes, key=lambda node: node.position)
    if len(strengths) > 1:
        lines[STRENGTH] = [
            LineNode(point, value, tables.place(point, k)) for value, point in strengths
        ]
    return lines


def _own_position(tables: Tables, kind: str) -> float:
    """The position of the baseline itself on a line of its variants."""
    settings = tables.data["settings"]
    if kind == SCALE:
        return 1.0
    if kind == TEMPERATURE:
        return settings["sampling"]["temperature"]
    return float(len(tables.runs_at(tables.baseline)[0]["training"]["reward"]))


def distance_to_line(
    point: Place, nodes: Sequence[LineNode], steps: bool
) -> CrossedEstimate | None:
    """pass@k of a point minus that of a line at its pass@1; None if the line has no value there.

    Args:
        point: a method's place.
        nodes: of the line, by ascending position.
        steps: require neighbours at most a factor `LARGEST_STEP` apart.
    """
    level, result = float(point.first.mean()), []
    for left, right in itertools.pairwise(nodes):
        ends = sorted(float(node.place.first.mean()) for node in (left, right))
        far = steps and right.position > LARGEST_STEP * left.position * (1 + 1e-9)
        if ends[0] <= level <= ends[1] and ends[0] < ends[1] and not far:
            result.append(distance_to_chord(point, left.place, right.place))
    # A line that bends back has several values there: the highest counts.
    return min(result, key=lambda item: item.mean, default=None)


def above_lines(
    tables: Tables, point: str, lines: dict[str, list[LineNode]], k: int
) -> dict[str, CrossedEstimate]:
    """The distance of a point to each line that has a value at its pass@1."""
    place = tables.place(point, k)
    distances = {}
    for name, nodes in lines.items():
        if any(node.label == point for node in nodes):
            continue
        if (result := distance_to_line(place, nodes, name != MIXTURE)) is not None:
            distances[name] = result
    return distances


def envelope(distances: dict[str, CrossedEstimate]) -> tuple[str, CrossedEstimate] | None:
    """The highest line and the distance to it; None if no line has a value."""
    if not distances:
        return None
    name = min(distances, key=lambda line: distances[line].mean)
    return name, distances[name]


def average_nodes(nodes: Sequence[LineNode]) -> list[dict[str, Any]]:
    """The nodes of a line as dicts: label, mean pass@1 and mean pass@k."""
    return [
        {
            "label": node.label,
            "pass@1": float(np.mean(node.place.first)),
            "pass@k": float(np.mean(node.place.many)),
        }
        for node in nodes
    ]
