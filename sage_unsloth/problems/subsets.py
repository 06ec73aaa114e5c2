"""A few of many problems, evenly over families."""

from collections.abc import Sequence


def over_families(rows: Sequence[dict], count: int | None) -> list[dict]:
    """`count` rows, evenly over the families; all rows for None."""
    if count is None or count >= len(rows):
        return list(rows)
    by_family = sorted(rows, key=lambda row: row["family"])
    return [by_family[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]
