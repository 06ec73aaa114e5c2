"""When a run is evaluated on held-out rows, and when it ends because of that: functions of the
settings and of the curve so far.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.runs.checkpoints import is_last, step_of
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rows import METRICS, PASS_AT_1, best_evaluation, held_out_curve


def best_metric(config: RlvrConfig) -> str:
    """The name in `metrics.jsonl` of what `config.best_by` compares."""
    return PASS_AT_1 if config.best_by == "pass@1" else f"eval/pass@{config.eval_samples}"


def is_due(config: RlvrConfig, curve: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether an evaluation after this step is asked for and is not in the curve yet."""
    if not config.eval_steps or any(row["step"] == step for row in curve):
        return False
    return step % config.eval_steps == 0 or step >= config.max_steps


def is_within_budget(config: RlvrConfig, row: Mapping[str, Any]) -> bool:
    """Whether pass@k, k = `eval_samples`, has lost at most `coverage_budget` since before training;
    always without a budget.
    """
    change = row.get(f"eval/change@{config.eval_samples}", 0.0)
    return not config.coverage_budget or change >= -config.coverage_budget


def best_of(config: RlvrConfig, curve: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The best evaluation by `best_by` among those within the budget, the first of equal ones."""
    allowed = [row for row in curve if is_within_budget(config, row)]
    return best_evaluation(allowed, best_metric(config))


def reason_to_end(config: RlvrConfig, curve: Sequence[Mapping[str, Any]]) -> str:
    """Why training ends after these evaluations; empty where it goes on.

    The coverage budget is spent when two evaluations in a row are below it: one may be by chance.
    """
    last = list(curve[-2:])
    if len(last) == 2 and not any(is_within_budget(config, row) for row in last):
        return (
            f"pass@{config.eval_samples} on held-out rows lost more than "
            f"{config.coverage_budget:g} in two evaluations in a row (coverage_budget)"
        )
    best = best_of(config, curve)
    since = 0 if best is None else sum(row["step"] > best["step"] for row in curve)
    if 0 < config.patience <= since:
        return (
            f"the last {config.patience} evaluations on held-out rows were no better than the best "
            "before them (patience)"
        )
    return ""


def has_ended(config: RlvrConfig, folder: Path, checkpoint: Path | None) -> bool:
    """Whether nothing is left to train, nor to evaluate, after the checkpoint of a run."""
    if checkpoint is None:
        return False
    step, log = step_of(checkpoint), folder / METRICS
    curve = held_out_curve(read_jsonl(log) if log.exists() else [], step)
    if is_due(config, curve, step):
        return False
    return is_last(checkpoint) or bool(reason_to_end(config, curve))
