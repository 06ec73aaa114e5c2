"""Metrics of an evaluation on held-out problems.

eval/pass@k, _low, _high       mean over problems for k = 1, 2, 4 … N, with its 95 % interval
eval/change@N, _low, _high     minus the same before training, paired by problem
eval/pass@N/GROUP              by the rows' column `family`
eval/guess@k                   of blind attempts, from the rows' column `guess`
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sage_unsloth.evaluation.intervals import Estimate, paired_interval, score_interval
from sage_unsloth.evaluation.metrics import guess_bound, pass_at_k, powers_of_two
from sage_unsloth.sampling.counts import correct_matrix

MOST_GROUPS = 12
"""With more families than this there are no curves by family."""


def held_out_metrics(
    records: Sequence[dict], rows: Sequence[dict], start: Sequence[dict] = ()
) -> dict[str, float]:
    """The metrics of one evaluation, for its step's row.

    Args:
        records: N of each row.
        rows: the held-out ones, with `id`; `family` and `guess` are used if all have them.
        start: the records before training; empty for that evaluation itself.

    Returns:
        The metrics above, `eval/format` and `eval/cut` (shares of completions with a solution tag,
        and without an end) and `eval/tokens` (mean length).
    """
    ids = [row["id"] for row in rows]
    correct_PN = correct_matrix(records, ids)
    samples = correct_PN.shape[1]
    result: dict[str, float] = {}
    for k in powers_of_two(samples):
        values_P = _pass_at_k(correct_PN, k)
        result |= _with_interval(f"eval/pass@{k}", score_interval(values_P[None]))
        if all("guess" in row for row in rows):
            chances_P = np.array([row["guess"] for row in rows], dtype=float)
            result[f"eval/guess@{k}"] = float(guess_bound(chances_P, k).mean())
    values_P = _pass_at_k(correct_PN, samples)
    if start:
        before_P = _pass_at_k(correct_matrix(start, ids), samples)
        # Paired by problem: differences vary less than the two means.
        change = paired_interval(values_P[None], before_P[None])
        result |= _with_interval(f"eval/change@{samples}", change)
    families_P = np.array([str(row.get("family", "")) for row in rows])
    names = list(dict.fromkeys(families_P))
    if "" not in names and 1 < len(names) <= MOST_GROUPS:
        for name in names:
            result[f"eval/pass@{samples}/{name}"] = float(values_P[families_P == name].mean())
    n = len(records)
    return result | {
        "eval/format": sum(record["extracted"] is not None for record in records) / n,
        "eval/cut": sum(record["finish_reason"] != "stop" for record in records) / n,
        "eval/tokens": sum(record["num_tokens"] for record in records) / n,
    }


def change_text(row: Mapping[str, Any], k: int) -> str:
    """One sentence about the change of pass@k; empty without `eval/change@k`."""
    name = f"eval/change@{k}"
    if name not in row:
        return ""
    change, low, high = (row[name + end] for end in ("", "_low", "_high"))
    # Only an interval that excludes 0 is a change.
    verdict = "fell" if high < 0 else "rose" if low > 0 else "may not have changed"
    return f"pass@{k} {verdict}: {change:+.3f} [{low:+.3f}, {high:+.3f}] against before training."


def _pass_at_k(correct_PN: np.ndarray, k: int) -> np.ndarray:
    return np.asarray(pass_at_k(correct_PN.shape[1], correct_PN.sum(axis=1), k))


def _with_interval(name: str, estimate: Estimate) -> dict[str, float]:
    return {
        name: estimate.mean,
        f"{name}_low": estimate.low,
        f"{name}_high": estimate.high,
    }
