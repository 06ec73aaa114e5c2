"""What stage 2 is asked for, judged, and what of it must be equal for a run to be resumed."""

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
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.problems.row_weights import weighted_rows
from sage_unsloth.training.held_out_rows import check_evaluations, split_rows
from sage_unsloth.training.own_algorithms import own_code
from sage_unsloth.training.rlvr_checks import (
    check_fills_a_step,
    check_golds,
    check_judges,
    check_rehearsal,
    check_request,
)
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rollout_engine import choose_engine
from sage_unsloth.training.stage import check_rows, digest_of, run_settings

logger = logging.getLogger(__name__)


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
    tokenizer: Any = field(default=None, compare=False, repr=False)

    @property
    def max_length(self) -> int:
        return self.config.max_prompt_length + self.config.max_completion_length


def resolve(
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
    """Judge what stage 2 is asked for, before Unsloth or a model is loaded.

    Args:
        config: settings.
        model_path: folder or hub id of the model below the adapter.
        rows: dicts with `problem` (or `messages`, a conversation), `answer`, and `gold` where the
            verifier compares with something else; other columns are passed to rewards.
        folder: gets `adapter/` (`model/` after full fine-tuning; complete or absent),
            `checkpoints/` while training, `metrics.jsonl`, a row each optimizer step,
            `completions.jsonl` and `preflight.json`; with evaluations `held-out/` and `best/`.
        guide: shapes the KL anchor; None leaves it at π_ref.
        name: on the progress bar.
        adapter: start from this adapter instead of a fresh one; then π_ref is the model without it,
            `config.reference="base"`.
        held_out: rows for the held-out curve (`config.eval_steps`); None holds `config.eval_rows`
            of `rows` out. Rows to train on with the same problem are left out.
        callbacks: further transformers `TrainerCallback`s, such as `live.LivePlot`. They are no
            part of the recorded settings, so they must not change what is trained.
        force: train also where the preflight finds nothing to learn from.
        verifier: what makes an answer right, as `verifiers.get_verifier` takes it.
        rewards: what a completion is rewarded for, as `reward_functions.get_rewards` takes it; None
            for the checked answer alone. Where they lack it, rows need no `answer`.
        data: where the rows are from, for `run.json`, as `Corpus.record` has it.
        command: the words that started it, for `run.json`.
        tokenizer: of the policy (`load_tokenizer`), by which the prompts are known to fit; None
            loads it, and looks.
        judged: settings, processes, evaluations and rewards were judged already.

    Raises:
        ValueError: a reward that cannot be used, raises, takes longer than `config.reward_seconds`
            or returns something else than finite numbers; a verifier that its workers cannot run;
            a row lacks a column or a value; fewer rows than a step takes; every group of
            the preflight is dead; a guide with β = 0; settings that contradict
            each other, or the number of processes; a folder of another run.
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
        verifier = UNGRADED
    check_rows(rows, ("problem",) if verifier is UNGRADED else ("problem", "answer"))
    if (adapter is None) != (config.reference == "sft"):
        raise ValueError(
            "reference='base' trains on an adapter against the model without it, and "
            f"reference='sft' trains a fresh one; got reference={config.reference!r} with "
            f"adapter={adapter}; give both, or neither"
        )
    graded = verifier is not UNGRADED
    if not judged:
        check_evaluations(config, None if held_out is None else len(held_out), graded=graded)
    rows, selected = split_rows(config, rows, held_out)
    check_golds([*rows, *selected], verifier)
    if config.balance_by:
        different = len(rows)
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
        rollouts=choose_engine(config),
        callbacks=callbacks,
        force=force,
        verifier=verifier,
        rewards=requested,
        data=data,
        command=tuple(command),
        tokenizer=tokenizer,
    )


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
