"""Stage 2: RL with verifiable rewards, through Unsloth's fast GRPO loss, with or without a guide in
its KL anchor.

A stage is a function of a config, a model, rows and a folder. A folder that is complete returns at
once, one that was killed goes on from its last checkpoint with the same guide values, data order
and random state, one with other settings is refused.
"""

import copy
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.mathematics import normalise
from sage_unsloth.grading.reward import SolutionReward
from sage_unsloth.models.device import frees_models
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.teacher import drop_teacher, forget_teacher, is_adapter, load_teacher
from sage_unsloth.models.tokenizers import load_stop_tokens, load_tokenizer
from sage_unsloth.models.weights import model_identity
from sage_unsloth.objective.choices import check_choices
from sage_unsloth.objective.guides import Guide
from sage_unsloth.patch import switches
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.patch.loading import load_unsloth
from sage_unsloth.patch.resampling import dynamic_sampling
from sage_unsloth.runs.checkpoints import copy_result, is_last, last_checkpoint
from sage_unsloth.runs.files import whole_folder
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.processes import rank, wait_for_all, world_size
from sage_unsloth.sampling.engine_choice import (
    choose_rollouts,
)
from sage_unsloth.sampling.engines import TransformersEngine, VllmEngine
from sage_unsloth.sampling.record_sets import prompt_ids
from sage_unsloth.training.preflight import preflight
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_trainer import COMPLETIONS, extra_metrics, make_trainer
from sage_unsloth.training.stage import (
    begin,
    check_rows,
    check_tracker,
    forget_after,
    run_settings,
    train,
)

logger = logging.getLogger(__name__)


@frees_models
def rlvr(
    config: RlvrConfig,
    model_path: str | Path,
    rows: Sequence[dict],
    folder: str | Path,
    guide: Guide | None = None,
    name: str = "GRPO",
    adapter: str | Path | None = None,
) -> Path:
    """Train by GRPO with verifiable rewards and return the folder of the trained adapter, or model.

    Under torchrun every process calls this; they share each step's completions, and the first one
    writes.

    Args:
        config: settings.
        model_path: folder or hub id of the model below the adapter.
        rows: dicts with `problem` and `answer`.
        folder: gets `adapter/` (`model/` after full fine-tuning; complete or absent),
            `checkpoints/` while training, `metrics.jsonl`, a row each optimizer step,
            `completions.jsonl` and `preflight.json`.
        guide: shapes the KL anchor; None leaves it at π_ref.
        name: on the progress bar.
        adapter: start from this adapter instead of a fresh one; then π_ref is the model without it,
            `config.reference="base"`.

    Raises:
        ValueError: a row lacks a column or a value; a guide with β = 0; settings that contradict
            each other, or the number of processes; a folder of another run.
        ContractError: see `guided_kl`.
    """
    check_rows(rows, ("problem", "answer"))
    check_tracker(config.report_to)
    check_choices(
        guide=guide,
        beta=config.beta,
        kl_estimator=config.kl_estimator,
        credit=config.credit,
        teacher=config.teacher or None,
    )
    if (adapter is None) != (config.reference == "sft"):
        raise ValueError(
            "reference='base' trains on an adapter against the model without it, and "
            "reference='sft' trains a fresh one; "
            f"got reference={config.reference!r} with adapter={adapter}; give both, or neither"
        )
    _check_golds(rows)
    _check_processes(config)
    rollouts = choose_rollouts(
        "transformers" if config.rollouts == "auto" and world_size() > 1 else config.rollouts,
        full_finetuning=config.full_finetuning,
        load_in_4bit=config.load_in_4bit,
    )
    settings = run_settings("rlvr", config, model_path, rows)
    if rollouts == "vllm" and config.teacher and is_adapter(config.teacher):
        raise ValueError(
            f"with vLLM a teacher must be a model, because Unsloth passes every adapter on to "
            f"it; got the adapter {config.teacher}; "
            "merge it (python -m sage_unsloth export), or set rollouts=transformers"
        )
    settings |= {"guide": _guide_text(guide), "rollouts": rollouts}
    if adapter is not None:
        settings["adapter"] = model_identity(model_path, adapter)["adapter"]
    if config.teacher:
        settings["teacher"] = (
            f"{Path(config.teacher).name} {model_identity(config.teacher)['weights']}"
        )
    with locked(folder) if rank() == 0 else nullcontext():
        if rank() == 0:
            begin(folder, settings, config, model_path)
        return _rlvr(config, model_path, rows, Path(folder), guide, name, adapter, rollouts)


def _guide_text(guide: Guide | None) -> str:
    """What a run records of its guide: as it prints itself, or its class and attributes where that
    would be an address.

    A set among the attributes is written in order: Python's own order changes from one process to
    the next, and a run could not go on.
    """
    if guide is None or type(guide).__repr__ is not object.__repr__:
        return repr(guide)
    attributes = {
        name: sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        for name, value in vars(guide).items()
    }
    return f"{type(guide).__qualname__} {attributes}"


def _rlvr(
    config: RlvrConfig,
    model_path: str | Path,
    rows: Sequence[dict],
    folder: Path,
    guide: Guide | None,
    name: str,
    adapter: str | Path | None,
    rollouts: str,
) -> Path:
    """`rlvr` once the folder is this process's own."""
    checkpoints = folder / "checkpoints"
    trained = folder / ("model" if config.full_finetuning else "adapter")
    if trained.exists():
        logger.info("%s is complete: %s", name, trained)
        if rank() == 0:
            shutil.rmtree(checkpoints, ignore_errors=True)
        return trained
    switches.recompute_logits(config.recompute_logits)
    load_unsloth(standby=rollouts == "vllm")
    wait_for_all()  # until the first process has seen that the folder is this run's
    _refuse_long_prompts(load_tokenizer(model_path), rows, config.max_prompt_length)
    model, tokenizer = load_policy(
        model_path,
        lora=None if config.full_finetuning else config.lora,
        adapter=adapter,
        full_finetuning=config.full_finetuning,
        max_length=config.max_prompt_length + config.max_completion_length,
        load_in_4bit=config.load_in_4bit,
        use_vllm=rollouts == "vllm",
        gpu_memory_utilization=config.gpu_memory_utilization,
        seed=config.seed,
    )
    untouched = copy.deepcopy(tokenizer)  # the trainer sets padding and truncation in its own
    teacher = None
    if config.teacher:
        teacher = load_teacher(
            config.teacher,
            model_path,
            model,
            tokenizer,
            max_length=config.max_prompt_length + config.max_completion_length,
            load_in_4bit=config.load_in_4bit,
        )
    resume = last_checkpoint(checkpoints)
    # Killed between the last checkpoint and the adapter: there is nothing left to train.
    finished = is_last(resume)
    if not finished:
        with Grader(grading_workers(), config.grade_seconds) as grader:
            if resume is None and config.preflight_prompts and rank() == 0:
                # The engine beside the model draws without an adapter, as a fresh one is.
                engine = TransformersEngine(model, tokenizer)
                if rollouts == "vllm" and adapter is None:
                    stops = load_stop_tokens(model_path, tokenizer)
                    engine = VllmEngine.around(model.vllm_engine, tokenizer, stops)
                preflight(config, engine, rows, folder)
            wait_for_all()
            reward = SolutionReward(grader)
            trainer = make_trainer(config, model, tokenizer, rows, folder, reward, rollouts)
            with (
                guided_kl(
                    trainer,
                    guide,
                    kl_estimator=config.kl_estimator,
                    credit=config.credit,
                    teacher=teacher,
                    log_entropy=config.log_entropy,
                ),
                dynamic_sampling(trainer, config.max_resamples),
            ):
                forget_teacher(resume)
                if rank() == 0:
                    forget_after(folder / COMPLETIONS, resume)
                train(
                    trainer,
                    folder,
                    name,
                    resume=resume,
                    extra=extra_metrics(config, guide, folder, reward),
                )
        drop_teacher(trainer.model, teacher)
        if rank() == 0:
            _warn_if_untrained(trainer.model)
    wait_for_all()  # every process is done with the checkpoints
    if rank() == 0:
        with whole_folder(trained) as partial:
            if finished:
                copy_result(resume, partial)
            else:
                trainer.model.save_pretrained(partial)
            untouched.save_pretrained(partial)
        shutil.rmtree(checkpoints, ignore_errors=True)
    wait_for_all()
    return trained


def _check_processes(config: RlvrConfig) -> None:
    """What one process can do and several cannot."""
    processes = world_size()
    if processes == 1:
        return
    share, rest = divmod(config.completions_per_step, processes)
    if rest or share % (config.micro_batch_size or 1):
        raise ValueError(
            f"the completions of a step ({config.completions_per_step}) must be divisible by the "
            f"number of processes, and the "
            f"share of each by micro_batch_size; got WORLD_SIZE={processes} and "
            f"micro_batch_size={config.micro_batch_size}; "
            "change prompts_per_step, micro_batch_size or the number of processes"
        )
    if config.credit == "sequence" and share % config.num_generations:
        raise ValueError(
            "credit='sequence' compares the completions of a prompt, so each process must have "
            "whole prompts: prompts_per_step "
            f"must be a multiple of the number of processes; got {config.prompts_per_step} and "
            f"WORLD_SIZE={processes}"
        )
    if config.max_resamples or config.rollouts == "vllm":
        raise ValueError(
            "several processes need max_resamples=0, because groups may be split between them, "
            "and rollouts by transformers, because "
            f"vLLM inside each was not tried; got max_resamples={config.max_resamples} and "
            f"rollouts={config.rollouts!r}; "
            "change these, or start without torchrun"
        )


def _check_golds(rows: Sequence[dict]) -> None:
    """A gold that is no answer would end the run at the step that meets it."""
    for number, row in enumerate(rows):
        if normalise(row["answer"]) is None:
            raise ValueError(
                f"a gold answer must be text that can be graded; row {number} has "
                f"{row['answer']!r:.100}; drop or repair the row"
            )


def _refuse_long_prompts(tokenizer: Any, rows: Sequence[dict], limit: int) -> None:
    """A prompt over the limit would push the end of its completion out of what is scored."""
    lengths = [len(prompt_ids(tokenizer, row["problem"])) for row in rows]
    longer = [number for number, length in enumerate(lengths) if length > limit]
    if longer:
        raise ValueError(
            f"every prompt must fit max_prompt_length={limit} tokens; {len(longer)} of "
            f"{len(rows)} do not, the first is row "
            f"{longer[0]} with {lengths[longer[0]]}; raise max_prompt_length, or drop these rows"
        )


def _warn_if_untrained(model: Any) -> None:
    """An adapter whose B is still 0 changes nothing: no group had a mixed reward, or the learning
    rate is 0.
    """
    sizes = [p.detach().abs().max().item() for n, p in model.named_parameters() if "lora_B" in n]
    if sizes and max(sizes) == 0:
        logger.warning(
            "The adapter is still zero, so the model has not changed: look at "
            "frac_reward_zero_std in metrics.jsonl; where it "
            "is 1, every group got one reward and there was nothing to learn from. Easier "
            "problems or more SFT help."
        )
