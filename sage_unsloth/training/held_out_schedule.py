"""When a run is evaluated on held-out rows, and when it ends because of that: functions of the
settings and of the curve so far.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.runs.checkpoints import is_last, step_of
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rows import METRICS, PASS_AT_1, evaluations_since_best, held_out_curve


def best_metric(config: RlvrConfig) -> str:
    """The name in `metrics.jsonl` of what `config.best_by` compares."""
    return PASS_AT_1 if config.best_by == "pass@1" else f"eval/pass@{config.eval_samples}"


def is_due(config: RlvrConfig, curve: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether an evaluation after this step is asked for and is not in the curve yet."""
    if not config.eval_steps or any(row["step"] == step for row in curve):
        return False
    return step % config.eval_steps == 0 or step >= config.max_steps


def is_exhausted(config: RlvrConfig, curve: Sequence[Mapping[str, Any]]) -> bool:
    """Whether training ends here because of `config.patience`."""
    since = evaluations_since_best(curve, best_metric(config))
    return 0 < config.patience <= since


def has_ended(config: RlvrConfig, folder: Path, checkpoint: Path | None) -> bool:
    """Whether nothing is left to train, nor to evaluate, after the checkpoint of a run."""
    if checkpoint is None:
        return False
    step, log = step_of(checkpoint), folder / METRICS
    curve = held_out_curve(read_jsonl(log) if log.exists() else [], step)
    if is_due(config, curve, step):
        return False
    return is_last(checkpoint) or is_exhausted(config, curve)
