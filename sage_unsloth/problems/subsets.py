"""A few of many problems."""

from collections import Counter
from collections.abc import Mapping, Sequence


def over_families(rows: Sequence[dict], count: int | None) -> list[dict]:
    """`count` rows, spread evenly over the families; all of them, in their order, for None."""
    if count is None or count >= len(rows):
        return list(rows)
    by_family = sorted(rows, key=lambda row: row["family"])
    return [by_family[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]


def in_units(rows: Sequence[dict], sizes: Mapping[str, int]) -> list[dict]:
    """The rows with a `unit` each: so many problems of a family, in their order, count as one.

    Args:
        rows: with `family`.
        sizes: family -> problems of a unit; 1 where a family has none.
    """
    place: Counter[str] = Counter()
    found = []
    for row in rows:
        family = row["family"]
        found.append(row | {"unit": f"{family}-{place[family] // sizes.get(family, 1)}"})
        place[family] += 1
    return found
