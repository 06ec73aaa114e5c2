"""Stage 2: RL with verifiable rewards in Unsloth's or TRL's GRPO trainer, with or without a guide.

A stage is a function of a config, a model, rows and a folder. A complete folder returns at once. A
killed run resumes from its last checkpoint with the same guide values, data order and random state.
A folder with other settings is refused.
"""

import copy
import functools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.total_reward import TotalReward
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.rehearsal import Stored
from sage_unsloth.models.device import frees_models, has_gpu
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.teacher import drop_teacher, forget_teacher, load_teacher
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.models.trained import write_readme
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.runs.checkpoints import copy_result, last_checkpoint
from sage_unsloth.runs.files import whole_folder
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.processes import rank, wait_for_all
from sage_unsloth.trainers import switches
from sage_unsloth.trainers.backends import TRL, load_backend
from sage_unsloth.training.guide_dose import report_dose
from sage_unsloth.training.held_out import HeldOut
from sage_unsloth.training.held_out_schedule import has_ended
from sage_unsloth.training.ledger import Ledger
from sage_unsloth.training.number_formats import dtype_of_weights
from sage_unsloth.training.preflight import check_signal, preflight
from sage_unsloth.training.rehearsal import draw_rehearsal
from sage_unsloth.training.rlvr_checks import check_prompt_lengths
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import RlvrJob, resolve_rlvr, resume_key
from sage_unsloth.training.rlvr_trainer import (
    extra_metrics,
    make_trainer,
    warn_if_untrained,
)
from sage_unsloth.training.rollout_engine import (
    engine_kwargs,
    preflight_engine,
    start_engine,
)
from sage_unsloth.training.sharded import whole_weights
from sage_unsloth.training.stage import (
    COMPLETIONS,
    run_trainer,
    set_aside_rows,
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
    """Trains by GRPO with verifiable rewards; returns the folder of the trained adapter or model.

    This is `resolve_rlvr`, which documents the arguments, then `run_rlvr_job`. Under torchrun every
    process calls it; they share each step's completions, and the first one writes.
    """
    return run_rlvr_job(
        resolve_rlvr(config, model_path, rows, folder, guide, name, adapter, **others)
    )


@frees_models
def run_rlvr_job(job: RlvrJob) -> Path:
    """Opens the folder of a resolved job and trains there, or returns its finished result."""
    settings, ledger = resume_key(job), Ledger(job.folder, "rlvr")
    # One process holds the lock for all.
    with exclusive_lock(job.folder) if rank() == 0 else nullcontext():
        if rank() == 0:
            ledger.begin(settings, job.config, job.model_path, job.data, job.command)
        return _rlvr(job, ledger)


def _rlvr(job: RlvrJob, ledger: Ledger) -> Path:
    """`run_rlvr_job` with the folder locked."""
    config = job.config
    trained = job.folder / ("model" if config.full_finetuning else "adapter")
    if trained.exists():
        ledger.complete(trained)
        logger.info("%s is complete: %s", job.name, trained)
        return trained
    resume = last_checkpoint(ledger.checkpoints)
    ledger.check_checkpoints(resume, config.save_steps)
    switches.recompute_logits(config.recompute_logits)
    with_vllm = config.backend != TRL and job.rollouts == "vllm"
    load_backend(config.backend, standby=job.rollouts == "vllm" and has_gpu())
    # The first process checks that the folder is this run's; the others wait for it.
    wait_for_all()
    tokenizer = job.tokenizer
    if tokenizer is None:
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
        tokenizer=tokenizer,
        **engine_kwargs(config, with_vllm=with_vllm),
    )
    if with_vllm:
        start_engine(config, model, job.model_path, job.max_length)
    # A copy, because the trainer sets padding and truncation in its own.
    untouched = copy.deepcopy(tokenizer)
    # Killed between the last checkpoint and the adapter: there is nothing left to train.
    whole: dict[str, Any] = {}
    finished = resume if has_ended(config, job.folder, resume) else None
    if finished is None:
        model, whole = _train(job, model, tokenizer, untouched, resume)
    # The first process deletes the checkpoints, which others may still be reading.
    wait_for_all()
    if rank() == 0:
        # A result folder is complete or absent, also after a kill.
        with whole_folder(trained) as partial:
            if finished is None:
                model.save_pretrained(partial, **whole)
            else:
                copy_result(finished, partial)
            untouched.save_pretrained(partial)
            if not config.full_finetuning:
                write_readme(partial)
    ledger.complete(trained)
    wait_for_all()
    return trained


def _train(
    job: RlvrJob, model: Any, tokenizer: Any, untouched: Any, resume: Path | None
) -> tuple[Any, dict[str, Any]]:
    """Trains from the checkpoint `resume`, or from the start after a preflight.

    The trainer gets `tokenizer`, evaluations `untouched`.

    Returns:
        The trainer's model without the teacher, and further arguments of its `save_pretrained`.
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
        # vLLM samples without an adapter, which is only right while the adapter is fresh.
        by_vllm = config.backend != TRL and job.rollouts == "vllm" and job.adapter is None
        engine = functools.partial(
            preflight_engine, model, tokenizer, job.model_path, by_vllm=by_vllm
        )
        # A run that resumes has passed its preflight.
        if resume is None and config.preflight_prompts and rank() == 0:
            result, records = preflight(config, engine(), job.rows, folder, job.verifier, reward)
            check_signal(result, config, force=job.force)
            if job.guide is not None:
                report_dose(records, config, job.guide, model, tokenizer, job.rows, folder)
        stored: list[Stored] = []
        if config.rehearsal_coef:
            stored = draw_rehearsal(
                config, engine(), job.rows, folder, job.verifier, resumed=resume is not None
            )
        # Only the first process sampled; the trainer must not begin without it.
        wait_for_all()
        trainer = make_trainer(config, model, tokenizer, job.rows, folder, reward, job.rollouts)
        # Methods are opened around the trainer, and closed before it is saved.
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
                set_aside_rows(folder / COMPLETIONS, resume)
            run_trainer(
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
