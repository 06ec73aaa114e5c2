"""Stage 2: RL with verifiable rewards by the GRPO trainer of Unsloth or of TRL, with or without a
guide.

A stage is a function of a config, a model, rows and a folder. A complete folder returns at once; a
run that was killed resumes from its last checkpoint with the same guide values, data order and
random state; a folder with other settings is refused.
"""

import copy
import functools
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.reward_functions import (
    Reward,
    get_rewards,
)
from sage_unsloth.grading.total_reward import UNGRADED, TotalReward
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.methods.choices import check_choices
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.rehearsal import Stored
from sage_unsloth.models.device import frees_models, has_gpu
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.teacher import drop_teacher, forget_teacher, load_teacher
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.models.trained import write_readme
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.problems.row_weights import weighted_rows
from sage_unsloth.runs.checkpoints import copy_result, last_checkpoint
from sage_unsloth.runs.files import whole_folder
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.processes import rank, wait_for_all
from sage_unsloth.trainers import switches
from sage_unsloth.trainers.backends import TRL, load_backend
from sage_unsloth.trainers.known_lines import without_known_lines
from sage_unsloth.training.guide_dose import report_dose
from sage_unsloth.training.held_out import HeldOut
from sage_unsloth.training.held_out_rows import split_rows
from sage_unsloth.training.held_out_schedule import has_ended
from sage_unsloth.training.number_formats import dtype_of_weights
from sage_unsloth.training.preflight import check_signal, preflight
from sage_unsloth.training.rehearsal import draw_rehearsal
from sage_unsloth.training.rlvr_checks import (
    check_fills_a_step,
    check_golds,
    check_judges,
    check_prompt_lengths,
    check_rehearsal,
    check_request,
)
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import RlvrJob, resume_key
from sage_unsloth.training.rlvr_trainer import (
    extra_metrics,
    make_trainer,
    warn_if_untrained,
)
from sage_unsloth.training.rollout_engine import (
    choose_engine,
    engine_kwargs,
    preflight_engine,
    start_engine,
)
from sage_unsloth.training.sharded import whole_weights
from sage_unsloth.training.stage import (
    COMPLETIONS,
    check_checkpoints,
    check_rows,
    check_trained,
    set_aside_after,
    start_run,
    train,
)

logger = logging.getLogger(__name__)


def rlvr(
    config: RlvrConfig,
    model_path: str | Path,
    rows: Sequence[dict],
    folder: str | Path,
    guide: Guide | None = None,
    name: str = "GRPO",
    adapter: str | Path | None = None,
    **others: Any,
) -> Path:
    """Train by GRPO with verifiable rewards and return the folder of the trained adapter, or model:
    `resolve`, which has the arguments, then `run_job`.

    Under torchrun every process calls this; they share each step's completions, and the first one
    writes.
    """
    return run_job(resolve(config, model_path, rows, folder, guide, name, adapter, **others))


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
        judged: settings, processes and rewards were judged already (`check_request`), and the
            prompts are known to fit.

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
        # No reward checks the answer, so rows need none and nothing is graded.
        verifier = UNGRADED
    check_rows(rows, ("problem",) if verifier is UNGRADED else ("problem", "answer"))
    if (adapter is None) != (config.reference == "sft"):
        raise ValueError(
            "reference='base' needs an adapter to train further, and reference='sft' trains a "
            f"fresh one, got reference={config.reference!r} with adapter={adapter}"
        )
    rows, selected = split_rows(config, rows, held_out, graded=verifier is not UNGRADED)
    # Before a model is loaded: a gold that does not parse would make every group of its row dead.
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
    check_rehearsal(config, graded=verifier is not UNGRADED)
    rollouts = choose_engine(config)
    return RlvrJob(
        config=config,
        model_path=model_path,
        rows=rows,
        held_out=selected,
        folder=Path(folder),
        guide=guide,
        name=name,
        adapter=adapter,
        rollouts=rollouts,
        callbacks=callbacks,
        force=force,
        verifier=verifier,
        rewards=requested,
        data=data,
        command=tuple(command),
        judged=judged,
    )


@frees_models
def run_job(job: RlvrJob) -> Path:
    """Train what `resolve` gave: open the folder for it, then train there, or return its result."""
    settings = resume_key(job)
    with exclusive_lock(job.folder) if rank() == 0 else nullcontext():
        if rank() == 0:
            start_run(job.folder, settings, job.config, job.model_path, job.data, job.command)
        return _rlvr(job)


def _rlvr(job: RlvrJob) -> Path:
    """`run_job` once the folder is this process's own."""
    config = job.config
    checkpoints = job.folder / "checkpoints"
    trained = job.folder / ("model" if config.full_finetuning else "adapter")
    if trained.exists():
        check_trained(job.folder, trained)
        logger.info("%s is complete: %s", job.name, trained)
        if rank() == 0:
            shutil.rmtree(checkpoints, ignore_errors=True)
        return trained
    resume = last_checkpoint(checkpoints)
    check_checkpoints(job.folder, resume, config.save_steps)
    # Before the backend is loaded, which reads this variable.
    switches.recompute_logits(config.recompute_logits)
    with_vllm = config.backend != TRL and job.rollouts == "vllm"
    load_backend(config.backend, standby=job.rollouts == "vllm" and has_gpu())
    wait_for_all()  # until the first process has checked that the folder is this run's
    if not job.judged:
        tokenizer = load_tokenizer(job.model_path, config.template, job.adapter, config.prompt)
        check_prompt_lengths(tokenizer, [*job.rows, *job.held_out], config.max_prompt_length)
    model, tokenizer = load_policy(
        job.model_path,
        lora=None if config.full_finetuning else config.lora,
        adapter=job.adapter,
        full_finetuning=config.full_finetuning,
        max_length=job.max_length,
        load_in_4bit=config.load_in_4bit,
        dtype=dtype_of_weights(config.precision),
        gpu_memory_utilization=config.gpu_memory_utilization,
        seed=config.seed,
        template=config.template,
        prompt=config.prompt,
        **engine_kwargs(config, with_vllm=with_vllm),
    )
    if with_vllm:
        start_engine(config, model, job.model_path, job.max_length)
    untouched = copy.deepcopy(tokenizer)  # the trainer sets padding and truncation in its own
    # Killed between the last checkpoint and the adapter: there is nothing left to train.
    whole: dict[str, Any] = {}
    finished = resume if has_ended(config, job.folder, resume) else None
    if finished is None:
        model, whole = _train(job, model, tokenizer, untouched, resume)
    wait_for_all()  # every process is done with the checkpoints
    if rank() == 0:
        with whole_folder(trained) as partial:
            if finished is None:
                model.save_pretrained(partial, **whole)
            else:
                copy_result(finished, partial)
            untouched.save_pretrained(partial)
            if not config.full_finetuning:
                write_readme(partial)
        shutil.rmtree(checkpoints, ignore_errors=True)
    wait_for_all()
    return trained


def _train(
    job: RlvrJob, model: Any, tokenizer: Any, untouched: Any, resume: Path | None
) -> tuple[Any, dict[str, Any]]:
    """Train from the checkpoint `resume`, or from the start after a preflight, and return the
    trainer's model, without the teacher, and what else its `save_pretrained` takes. The trainer
    takes `tokenizer`, evaluations `untouched`.
    """
    config, folder = job.config, job.folder
    teacher = None
    if config.teacher:
        teacher = load_teacher(
            config.teacher,
            job.model_path,
            model,
            tokenizer,
            max_length=job.max_length,
            load_in_4bit=config.load_in_4bit,
        )
    judge = {"checker": job.verifier, "prompt": config.prompt}
    with Grader(grading_workers(), config.grade_seconds, **judge) as grader:
        reward = TotalReward(job.rewards, grader, config.reward_seconds)
        by_vllm = config.backend != TRL and job.rollouts == "vllm" and job.adapter is None
        engine = functools.partial(
            preflight_engine, model, tokenizer, job.model_path, by_vllm=by_vllm
        )
        # A run that resumes has passed its preflight.
        if resume is None and config.preflight_prompts and rank() == 0:
            result = preflight(config, engine(), job.rows, folder, job.verifier, reward)
            check_signal(result, config, force=job.force)
            if job.guide is not None:
                report_dose(config, job.guide, model, tokenizer, job.rows, folder)
        stored: list[Stored] = []
        if config.rehearsal_coef:
            stored = draw_rehearsal(
                config, engine(), job.rows, folder, job.verifier, resumed=resume is not None
            )
        wait_for_all()
        with without_known_lines(gpu=has_gpu()):
            trainer = make_trainer(config, model, tokenizer, job.rows, folder, reward, job.rollouts)
        with with_methods(
            trainer,
            job.guide,
            advantages=config.advantages,
            token_advantages=config.token_advantages,
            kl_estimator=config.kl_estimator,
            credit=config.credit,
            kl_in=config.kl_in,
            rehearsal=config.rehearsal,
            rehearsal_coef=config.rehearsal_coef,
            stored=stored,
            max_resamples=config.max_resamples,
            teacher=teacher,
            log_entropy=config.log_entropy,
        ):
            held_out = None
            if job.held_out:
                held_out = HeldOut(
                    config,
                    job.held_out,
                    folder,
                    trainer,
                    untouched,
                    job.model_path,
                    job.verifier,
                )
            # A teacher's adapter in the checkpoint would be loaded in place of the policy's.
            forget_teacher(resume)
            if rank() == 0:
                set_aside_after(folder / COMPLETIONS, resume)
            train(
                trainer,
                folder,
                job.name,
                resume=resume,
                callbacks=job.callbacks,
                held_out=held_out,
                report_to=config.report_to,
                extra=extra_metrics(config, job.guide, folder, reward),
            )
    # Before saving: `save_pretrained` writes every adapter of the model.
    drop_teacher(trainer.model, teacher)
    weights = whole_weights(trainer)
    if rank() == 0:
        warn_if_untrained(trainer.model.named_parameters() if weights is None else weights.items())
    return trainer.model, {} if weights is None else {"state_dict": weights}
