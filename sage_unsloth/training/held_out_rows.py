"""Which rows are held out of training, for the held-out curve."""

import logging
from collections.abc import Sequence

from sage_unsloth.problems.held_out import hold_out
from sage_unsloth.problems.sources import check_columns
from sage_unsloth.training.rlvr_config import RlvrConfig

LARGEST_SHARE = 4
"""At most one row in so many is held out."""

logger = logging.getLogger(__name__)


def split_rows(
    config: RlvrConfig,
    rows: Sequence[dict],
    held_out: Sequence[dict] | None = None,
) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows); without evaluations all rows are to train on.

    Args:
        config: `eval_rows` are held out of `rows`, at most a quarter, at even distances.
        rows: dicts with `problem` and `answer`.
        held_out: the held-out rows, where they are given; each gets an `id` if it has none.

    Rows with the problem of a held-out one are not trained on, which is logged.

    Raises:
        ValueError: too few rows; a row without a problem or an answer, or with the id of another.
    """
    if not config.eval_steps:
        return list(rows), []
    if held_out is None:
        count = min(config.eval_rows, len(rows) // LARGEST_SHARE)
        if count == 0:
            raise ValueError(
                f"to hold rows out of training there must be at least {LARGEST_SHARE}; got "
                f"{len(rows)}; give more rows, or eval_steps=0"
            )
        training, selected = hold_out(rows, count)
    else:
        selected = _with_ids(held_out)
        problems = {row["problem"] for row in selected}
        training = [row for row in rows if row["problem"] not in problems]
        if rows and not training:
            raise ValueError(
                f"held-out rows must leave rows to train on; all {len(rows)} rows share their "
                "problem with a held-out one; give other held-out rows"
            )
    shared = len(rows) - len(training) - (len(selected) if held_out is None else 0)
    logger.info(
        "Held-out curve: %d rows are held out, %d are trained on; %d are left out because they "
        "share a problem with a held-out one.",
        len(selected),
        len(training),
        shared,
    )
    return training, selected


def check_evaluations(config: RlvrConfig, given: int | None, *, graded: bool) -> None:
    """Raises ValueError where held-out rows and no evaluation are asked for, or the other way
    round.

    Args:
        config: of the run.
        given: how many held-out rows are given; None where they are taken from the training rows.
        graded: whether answers are checked.
    """
    if not config.eval_steps and given is not None:
        raise ValueError(
            "held-out rows are for evaluations during training, of which eval_steps=0 makes "
            f"none; got {given} rows; set eval_steps=50, say, or give none"
        )
    if given and config.eval_rows not in (RlvrConfig.eval_rows, given):
        raise ValueError(
            "eval_rows is a number of training rows to hold out, and of held-out rows that are "
            f"given all are evaluated; got eval_rows={config.eval_rows} with {given} rows; leave "
            "eval_rows out, or give fewer rows"
        )
    if config.eval_steps and not graded:
        raise ValueError(
            "pass@k on held-out rows counts right answers, for which rewards without the checked "
            f"answer do not look; got eval_steps={config.eval_steps}; set eval_steps=0, or add the "
            "checked answer to the rewards"
        )


def _with_ids(rows: Sequence[dict]) -> list[dict]:
    if not rows:
        raise ValueError(
            "there must be a held-out row; got none; give some, or leave them out: eval_rows of "
            "the training rows are then held out"
        )
    check_columns(rows, ("problem", "answer"))
    selected = [{"id": f"held-out-{number}"} | row for number, row in enumerate(rows)]
    names = [row["id"] for row in selected]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"each held-out row must have an id of its own, or none; {twice!r} is there "
            f"{names.count(twice)} times; rename them, or leave the column out"
        )
    return selected
