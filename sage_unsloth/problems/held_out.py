"""Splits rows into training and held-out ones."""

from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` rows, evenly spaced."""
    return [rows[int(i * len(rows) / count)] for i in range(count)]


def hold_out(rows: Sequence[dict], count: int) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows).

    `count` evenly spaced rows are held out; rows with the same problems are left out of training.

    Raises:
        ValueError: no row would be left to train on.
    """
    if count == 0:
        return list(rows), []
    if not 0 < count < len(rows):
        raise ValueError(f"held-out rows must be fewer than all rows, got {count} of {len(rows)}")
    chosen = spread(rows, count)
    problems = {row["problem"] for row in chosen}
    training = [row for row in rows if row["problem"] not in problems]
    if not training:
        raise ValueError(
            f"{count} held-out rows must leave another problem to train on, but the {len(rows)} "
            f"rows have {len(problems)} different problems"
        )
    return training, [{"id": f"held-out-{i}"} | row for i, row in enumerate(chosen)]
