"""When a run is evaluated on held-out rows and when it ends: functions of settings and curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.runs.checkpoints import checkpoint_step, is_last
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rows import METRICS, PASS_AT_1, best_evaluation, held_out_curve


def best_metric(config: RlvrConfig) -> str:
    """The metric in `metrics.jsonl` that `config.best_by` compares."""
    return PASS_AT_1 if config.best_by == "pass@1" else f"eval/pass@{config.eval_samples}"


def is_due(config: RlvrConfig, curve: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether an evaluation after this step is scheduled and not in the curve yet."""
    if not config.eval_steps or any(row["step"] == step for row in curve):
        return False
    return step % config.eval_steps == 0 or step >= config.max_steps


def is_within_budget(config: RlvrConfig, row: Mapping[str, Any]) -> bool:
    """Whether pass@k, k = `eval_samples`, fell by at most `coverage_budget` since the start.

    Always true without a budget.
    """
    change = row.get(f"eval/change@{config.eval_samples}", 0.0)
    return not config.coverage_budget or change >= -config.coverage_budget


def best_row(config: RlvrConfig, curve: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The best evaluation by `best_by` within the budget; the first of equal ones."""
    allowed = [row for row in curve if is_within_budget(config, row)]
    return best_evaluation(allowed, best_metric(config))


def reason_to_end(config: RlvrConfig, curve: Sequence[Mapping[str, Any]]) -> str:
    """Why training ends after these evaluations; empty if it goes on.

    The coverage budget must be exceeded by two evaluations in a row, the last by an interval below
    0: all are compared with the same samples of step 0, which may have been lucky.
    """
    last = list(curve[-2:])
    over = len(last) == 2 and not any(is_within_budget(config, row) for row in last)
    if over and last[-1][f"eval/change@{config.eval_samples}_high"] < 0:
        return (
            f"pass@{config.eval_samples} on held-out rows lost more than "
            f"{config.coverage_budget:g} in two evaluations in a row (coverage_budget)"
        )
    best = best_row(config, curve)
    # Counted in evaluations, not steps.
    since = 0 if best is None else sum(row["step"] > best["step"] for row in curve)
    # Patience 0 never ends a run.
    if 0 < config.patience <= since:
        return (
            f"the last {config.patience} evaluations on held-out rows were no better than the best "
            "before them (patience)"
        )
    return ""


def has_ended(config: RlvrConfig, folder: Path, checkpoint: Path | None) -> bool:
    """Whether nothing is left to train or evaluate after a run's checkpoint."""
    if checkpoint is None:
        return False
    step, log = checkpoint_step(checkpoint), folder / METRICS
    curve = held_out_curve(read_jsonl(log) if log.exists() else [], step)
    # A run killed between its last checkpoint and the last evaluation still owes that one.
    if is_due(config, curve, step):
        return False
    return is_last(checkpoint) or bool(reason_to_end(config, curve))
