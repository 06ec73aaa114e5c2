"""The checked arguments of stage 2, and which of them must be equal to resume a run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.reward_functions import Reward, get_rewards, recorded_rewards
from sage_unsloth.grading.total_reward import UNGRADED
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.methods.choices import check_choices
from sage_unsloth.models.weights import model_identity
from sage_unsloth.objective.describe import describe
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.problems.row_weights import weighted_rows
from sage_unsloth.training.held_out_rows import check_evaluations, split_rows
from sage_unsloth.training.own_algorithms import own_code
from sage_unsloth.training.rlvr_checks import (
    check_fills_a_step,
    check_judges,
    check_rehearsal,
    check_request,
    check_row_golds,
)
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rollout_engine import choose_rollout_engine
from sage_unsloth.training.stage import check_rows, rows_digest, run_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RlvrJob:
    """The checked arguments of `resolve_rlvr`, and the engine for the rollouts."""

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
    tokenizer: Any = field(default=None, compare=False, repr=False)

    @property
    def max_length(self) -> int:
        return self.config.max_prompt_length + self.config.max_completion_length


def resolve_rlvr(
    config: RlvrConfig,
    model_path: str | Path,
    rows: Sequence[dict],
    folder: str | Path,
    guide: Guide | None = None,
    name: str = "GRPO",
    adapter: str | Path | None = None,
    *,
    held_out: Sequence[dict] | None = None,
    callbacks: Sequence[Any] = (),
    force: bool = False,
    verifier: Checker | str | Callable[[str, str], Any] = MATH,
    rewards: Sequence[Reward | str | Callable[..., Any]] | None = None,
    data: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    tokenizer: Any = None,
    judged: bool = False,
) -> RlvrJob:
    """Checks the arguments of stage 2 before Unsloth or a model is loaded.

    Args:
        model_path: folder or hub id of the model below the adapter.
        rows: dicts with `problem`, optionally `messages` (a conversation that ends in the problem,
            which is then the prompt), `answer`, and `gold` if the
            verifier compares with something else; other columns are passed to rewards.
        folder: gets `adapter/` (`model/` after full fine-tuning; complete or absent),
            `checkpoints/` while training, `metrics.jsonl`, `completions.jsonl` and
            `preflight.json`; with evaluations `held-out/` and `best/`.
        guide: shapes the KL anchor; None leaves it at π_ref.
        adapter: start from this adapter instead of a fresh one; π_ref is then the model without it,
            and `config.reference` must be "base".
        held_out: rows for the held-out curve (`config.eval_steps`); None holds out
            `config.eval_rows` of `rows`. Training rows with the same problem are left out.
        callbacks: further transformers `TrainerCallback`s, such as `live.LivePlot`. They are not
            recorded, so they must not change what is trained.
        force: train even if the preflight finds nothing to learn from.
        verifier: grades the answers, see `verifiers.get_verifier`.
        rewards: see `reward_functions.get_rewards`; None for only the checked answer. Without the
            checked answer, rows need no `answer`.
        data: origin of the rows, for `run.json`, as in `Corpus.record`.
        command: the words of the command, for `run.json`.
        tokenizer: of the policy (`load_tokenizer`), if the prompts are known to fit; None loads it
            and checks.
        judged: settings, processes, evaluations and rewards have been checked already.

    Raises:
        ValueError: an invalid reward, verifier or row; fewer rows than a step needs; a guide with β
            = 0; settings that contradict each other, or the number of processes; a folder of
            another run.
        ContractError: see `guided_kl`.
    """
    check_choices(
        guide=guide,
        beta=config.beta,
        kl_estimator=config.kl_estimator,
        credit=config.credit,
        kl_in=config.kl_in,
        teacher=config.teacher or None,
    )
    if not judged:
        check_request(config)
    requested, verifier = get_rewards(rewards), get_verifier(verifier)
    if all(reward.function is not None for reward in requested):
        # No reward reads an answer, so rows need none.
        verifier = UNGRADED
    check_rows(rows, ("problem",) if verifier is UNGRADED else ("problem", "answer"))
    if (adapter is None) != (config.reference == "sft"):
        raise ValueError(
            "reference='base' needs an adapter to train further, and reference='sft' trains a "
            f"fresh one, got reference={config.reference!r} with adapter={adapter}"
        )
    graded = verifier is not UNGRADED
    if not judged:
        check_evaluations(config, None if held_out is None else len(held_out), graded=graded)
    rows, selected = split_rows(config, rows, held_out)
    check_row_golds([*rows, *selected], verifier)
    if config.balance_by:
        different = len(rows)
        # After the split: a repeated row must not be held out as well as trained on.
        rows = weighted_rows(rows, config.balance_by, config.num_generations)
        logger.info(
            "balance_by=%s: %d training rows are %d with repetitions.",
            config.balance_by,
            different,
            len(rows),
        )
    if not judged:
        check_judges(requested, verifier, rows, config.reward_seconds)
    check_fills_a_step(config, len(rows))
    check_rehearsal(config, graded=graded)
    return RlvrJob(
        config=config,
        model_path=model_path,
        rows=rows,
        held_out=selected,
        folder=Path(folder),
        guide=guide,
        name=name,
        adapter=adapter,
        rollouts=choose_rollout_engine(config),
        callbacks=callbacks,
        force=force,
        verifier=verifier,
        rewards=requested,
        data=data,
        command=tuple(command),
        tokenizer=tokenizer,
    )


def resume_key(job: RlvrJob) -> dict[str, Any]:
    """The settings that must be equal to resume the run."""
    settings = run_settings("rlvr", job.config, job.model_path, job.rows)
    if job.held_out:
        settings["held_out"] = rows_digest(job.held_out)
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
        # By name and weights: the same folder may hold another model by now.
        settings["teacher"] = f"{Path(job.config.teacher).name} {weights}"
    return settings


def recorded_guide(guide: Guide | None) -> str:
    """A guide for `run.json`: its repr, or class and attributes if the repr is an address.

    Sets are sorted, because their order differs between processes, and the run could not be
    resumed. So does an address of something within the guide; then only its settings are taken.
    """
    if guide is None or type(guide).__repr__ is not object.__repr__:
        text = repr(guide)
    else:
        attributes = {
            name: sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            for name, value in vars(guide).items()
        }
        text = f"{type(guide).__qualname__} {attributes}"
    return describe(guide) if " at 0x" in text else text
