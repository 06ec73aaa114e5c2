"""What stage 2 is asked for, and what of it must be equal for a run to be resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.reward_functions import Reward, recorded_rewards
from sage_unsloth.grading.total_reward import UNGRADED
from sage_unsloth.models.weights import model_identity
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.training.own_algorithms import own_code
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.stage import digest_of, run_settings


@dataclass(frozen=True)
class RlvrJob:
    """The arguments of `resolve`, judged, and the engine that was chosen for the rollouts."""

    config: RlvrConfig
    model_path: str | Path
    rows: Sequence[dict]
    held_out: Sequence[dict]
    folder: Path
    guide: Guide | None
    name: str
    adapter: str | Path | None
    rollouts: str
    callbacks: Sequence[Any]
    force: bool
    verifier: Checker
    rewards: tuple[Reward, ...]
    data: Mapping[str, Any] | None = None
    command: tuple[str, ...] = ()
    judged: bool = False

    @property
    def max_length(self) -> int:
        return self.config.max_prompt_length + self.config.max_completion_length


def resume_key(job: RlvrJob) -> dict[str, Any]:
    """What must be equal for the run to be resumed."""
    settings = run_settings("rlvr", job.config, job.model_path, job.rows)
    if job.held_out:
        settings["held_out"] = digest_of(job.held_out)
    settings |= {"guide": recorded_guide(job.guide), "rollouts": job.rollouts}
    settings |= own_code(job.guide, job.config.advantages, job.config.token_advantages)
    if (rewards := recorded_rewards(job.rewards)) is not None:
        settings["rewards"] = rewards
    if job.verifier not in (MATH, UNGRADED):
        settings["verifier"] = job.verifier.label
    if job.adapter is not None:
        settings["adapter"] = model_identity(job.model_path, job.adapter)["adapter"]
    if job.config.teacher:
        weights = model_identity(job.config.teacher)["weights"]
        settings["teacher"] = f"{Path(job.config.teacher).name} {weights}"
    return settings


def recorded_guide(guide: Guide | None) -> str:
    """A guide as `run.json` records it: its repr, or class and attributes where that is an address.

    A set among the attributes is written in sorted order, because Python's own order differs
    between processes, and a run could then not be resumed.
    """
    if guide is None or type(guide).__repr__ is not object.__repr__:
        return repr(guide)
    attributes = {
        name: sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        for name, value in vars(guide).items()
    }
    return f"{type(guide).__qualname__} {attributes}"
