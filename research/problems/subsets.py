"""Splits of problems without a common one, and problems that count together."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def in_units(rows: Sequence[dict], sizes: Mapping[str, int]) -> list[dict]:
    """The rows with a `unit` each: so many problems of a family, in their order, count as one.

    Args:
        rows: with `family`.
        sizes: family -> problems of a unit; 1 where a family has none.
    """
    place: Counter[str] = Counter()
    units = []
    for row in rows:
        family = row["family"]
        units.append(row | {"unit": f"{family}-{place[family] // sizes.get(family, 1)}"})
        place[family] += 1
    return units


def with_units(
    splits: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]
) -> dict[str, Mapping[str, int]]:
    """The sizes of splits, with as many test problems more as the units of a family need."""
    test = {name: count * sizes.get(name, 1) for name, count in splits["test"].items()}
    return {**splits, "test": test}


def allot(
    order: Sequence[Any],
    sizes: Mapping[str, Mapping[str, int]],
    sources: Mapping[str, Sequence[Any]],
    family: Callable[[Any], str | None],
) -> dict[str, tuple[Any, ...]]:
    """Splits without a common problem, one after another.

    Args:
        order: every problem, in the order in which they are taken and returned.
        sizes: split -> family -> problems.
        sources: split -> the problems that it may take.
        family: of a problem.
    """
    splits: dict[str, tuple[Any, ...]] = {}
    gone: set[Any] = set()
    for split, counts in sizes.items():
        allowed = set(sources[split]) - gone
        chosen = {
            item
            for name, count in counts.items()
            for item in [p for p in order if p in allowed and family(p) == name][:count]
        }
        splits[split] = tuple(item for item in order if item in chosen)
        gone |= chosen
    return splits
