"""Chooses the rows that are held out of training, for the held-out curve."""

import contextlib
import logging
from collections.abc import Sequence
from numbers import Real

from sage_unsloth.problems.held_out import hold_out
from sage_unsloth.problems.sources import check_columns
from sage_unsloth.training.rlvr_config import RlvrConfig

MIN_ROWS_PER_HELD_OUT = 4
"""At most one row in this many is held out."""

logger = logging.getLogger(__name__)


def split_rows(
    config: RlvrConfig,
    rows: Sequence[dict],
    held_out: Sequence[dict] | None = None,
) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows); all rows are for training if there are no evaluations.

    Training rows that share a problem with a held-out row are left out, which is logged.

    Args:
        config: `eval_rows` of `rows` are held out, at most a quarter, evenly spaced.
        rows: dicts with `problem` and `answer`.
        held_out: the held-out rows, if given; each gets an `id` if it has none.

    Raises:
        ValueError: too few rows; a row without a problem or an answer, or with a repeated id.
    """
    if not config.eval_steps:
        return list(rows), []
    if held_out is None:
        count = min(config.eval_rows, len(rows) // MIN_ROWS_PER_HELD_OUT)
        if count == 0:
            raise ValueError(
                f"holding rows out needs at least {MIN_ROWS_PER_HELD_OUT} of them, got "
                f"{len(rows)}. Give more rows, or eval_steps=0"
            )
        training, selected = hold_out(rows, count)
        _check_rows(selected)
    else:
        selected = _with_ids(held_out)
        problems = {row["problem"] for row in selected}
        # By problem and not by row: a repeated problem must not be on both sides.
        training = [row for row in rows if row["problem"] not in problems]
        if rows and not training:
            raise ValueError(
                f"held-out rows must leave rows to train on, but all {len(rows)} rows share their "
                "problem with a held-out one"
            )
    shared = len(rows) - len(training) - (len(selected) if held_out is None else 0)
    logger.info(
        "Held-out curve: %d rows are held out, %d are trained on, %d are left out because they "
        "share a problem with a held-out one.",
        len(selected),
        len(training),
        shared,
    )
    return training, selected


def check_evaluations(config: RlvrConfig, given: int | None, *, graded: bool) -> None:
    """Raises ValueError for held-out rows without evaluations, or the other way round.

    Args:
        given: number of given held-out rows; None if they come from the training rows.
    """
    if not config.eval_steps and given is not None:
        raise ValueError(
            f"held-out rows need eval_steps above 0, got {given} rows. Set eval_steps=50, say, or "
            "give none"
        )
    if given and config.eval_rows not in (RlvrConfig.eval_rows, given):
        raise ValueError(
            "eval_rows holds training rows out, and given held-out rows are all evaluated, got "
            f"eval_rows={config.eval_rows} with {given} rows. Leave eval_rows out, or give fewer "
            "rows"
        )
    if config.eval_steps and not graded:
        raise ValueError(
            "pass@k on held-out rows needs a reward that checks the answer, got "
            f"eval_steps={config.eval_steps}. Set eval_steps=0, or add the checked answer to the "
            "rewards"
        )


def _with_ids(rows: Sequence[dict]) -> list[dict]:
    if not rows:
        raise ValueError("held-out rows must not be empty. Give some, or leave them out")
    check_columns(rows, ("problem", "answer"))
    selected = [{"id": f"held-out-{number}"} | row for number, row in enumerate(rows)]
    _check_rows(selected)
    return selected


def _check_rows(rows: Sequence[dict]) -> None:
    """Raises ValueError for a repeated id, or a `guess` that is no chance."""
    names = [row.get("id") for row in rows]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"ids of held-out rows must differ, but {twice!r} is there {names.count(twice)} times"
        )
    for row in rows:
        if isinstance(row.get("guess"), str):  # of a CSV file
            with contextlib.suppress(ValueError):
                row["guess"] = float(row["guess"])
        guess = row.get("guess", 0)
        if not isinstance(guess, Real) or not 0 <= guess <= 1:
            raise ValueError(
                "`guess` must be the chance that a blind guess is right, from 0 to 1, got "
                f"{guess!r} in row {row['id']}. Correct it, or name that column differently"
            )
