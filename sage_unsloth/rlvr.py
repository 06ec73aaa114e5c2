"""Stage 2: RL with verifiable rewards, through Unsloth's fast GRPO loss, with or without a guide in its KL anchor.

A stage is a function of a config, a model, rows and a folder. A folder that is complete returns at once, one that was killed goes on
from its last checkpoint with the same guide values, data order and random state, one with other settings is refused.
"""

import copy
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.checkpoints import copy_result, is_last, last_checkpoint
from sage_unsloth.dynamic_sampling import dynamic_sampling
from sage_unsloth.engines import TransformersEngine, VllmEngine
from sage_unsloth.guides import Guide
from sage_unsloth.losses import LOSS_TYPES, check_credit
from sage_unsloth.models import LoraSettings, load_policy, load_stop_tokens, load_tokenizer
from sage_unsloth.patch import (
    check_causal,
    check_guide,
    check_penalty,
    check_teacher,
    guided_kl,
    load_unsloth,
)
from sage_unsloth.preflight import preflight
from sage_unsloth.processes import gathered, rank, wait_for_all, world_size
from sage_unsloth.prompts import prompt_messages
from sage_unsloth.records import append_jsonl, locked, whole_folder
from sage_unsloth.rewards import Grader, SolutionReward, grading_workers, normalise
from sage_unsloth.rollouts import ROLLOUTS, check_calls, choose_rollouts, generation_arguments
from sage_unsloth.sampling import prompt_ids
from sage_unsloth.stopping import frees_models
from sage_unsloth.teacher import drop_teacher, forget_teacher, is_adapter, load_teacher
from sage_unsloth.training import (
    begin,
    check_rows,
    check_tracker,
    common_arguments,
    forget_after,
    run_settings,
    train,
)
from sage_unsloth.weights import model_identity

COMPLETIONS = "completions.jsonl"
REFERENCES = ("sft", "base")
SCALE_REWARDS = ("group", "batch", "none")
FIRST_KL_MAX = 1e-3
"""Nats per token: above this, policy and reference were not the same model before the first step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RlvrConfig:
    """Stage 2 (Table 8); the values are the paper's where it gives one.

    Attributes:
        max_steps: optimizer steps.
        prompts_per_step: different problems in a step, over all processes.
        num_generations: completions sampled for each problem.
        micro_batch_size: completions that go through the loss together in one process; None takes all that a step gives it.
            Smaller needs less memory.
        max_completion_length: tokens.
        max_prompt_length: tokens; longer prompts are refused.
        learning_rate: peak; linear decay after `warmup_ratio` of the steps.
        weight_decay: of AdamW.
        beta: KL coefficient β.
        kl_estimator: the KL penalty, one of `losses.KL_ESTIMATORS`; "k3" is the paper's.
        credit: "token", the paper's, or "sequence": each token answers for the guide and the KL of those after it, so that the
            update follows Eq. 6; see `losses.sequence_credit`. All completions of a step then go through the loss together,
            and `micro_batch_size` says how many of them at a time have their logits computed.
        teacher: for a guide that reads one: an adapter's folder (on the same base), or a model's folder or hub id (with the same
            tokenizer); empty for none. A model takes its own memory, which the plan does not count.
        reference: what π_ref is: "sft", the model that RL starts from, or "base", the model below the adapter that it starts from.
        loss_type: how token losses are reduced ("grpo", "bnpo", "dr_grpo", "dapo").
        scale_rewards: what the advantages r − mean(r) are divided by: the standard deviation of the prompt's rewards ("group", as
            in the paper), of the step's ("batch"), or nothing ("none").
        epsilon, epsilon_high: clip range of the importance ratio.
        max_resamples: times that a rollout batch's groups without a signal are sampled again for other prompts (`dynamic_sampling`,
            with the cost of each); 0 never does.
        top_entropy_quantile: the policy term is kept at this share of the tokens, those before which the policy's entropy is
            highest, and the KL term at every token (TRL's entropy mask); 1 masks nothing.
        temperature, top_p, min_p: sampling; top-k is off.
        rollouts: "vllm", "transformers", or "auto": vLLM where it runs.
        recompute_logits: the loss computes its logits a second time in the backward pass instead of keeping them: less memory,
            the same result.
        gpu_memory_utilization: share of the card's memory for vLLM, weights included.
        vllm_importance_sampling_correction: weigh each token by trainer's over vLLM's probability, at most 2 (as TRL 0.23, which
            the authors ran); vLLM's is that after min-p, so the weight is the share of probability that min-p kept.
        full_finetuning: train every weight instead of an adapter.
        load_in_4bit: quantise the frozen weights (GPU only).
        preflight_prompts: prompts sampled before training to see whether there is anything to learn from; 0 skips it.
        log_entropy: log the policy's entropy also without a guide that needs it, so that runs can be compared; in full
            fine-tuning on Unsloth 2026.10.7 this costs time.
        save_steps: optimizer steps between checkpoints.
        sample_steps: optimizer steps between samples of completions in `completions.jsonl`; 0 writes none.
        report_to: "none", "tensorboard", "trackio" or "wandb"; `metrics.jsonl` is written in any case.
        grade_seconds: time limit for grading one answer.
        lora: the adapter.
        seed: of adapter, data order, the guide's noise, and of rollouts by transformers; vLLM's stream has a seed of its own,
            which Unsloth sets to 0 at every start.
    """

    max_steps: int = 1000
    prompts_per_step: int = 1
    num_generations: int = 8
    micro_batch_size: int | None = None
    max_completion_length: int = 1024
    max_prompt_length: int = 1024
    learning_rate: float = 5e-6
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    beta: float = 0.05
    kl_estimator: str = "k3"
    credit: str = "token"
    reference: str = "sft"
    teacher: str = ""
    loss_type: str = "grpo"
    scale_rewards: str = "group"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    max_resamples: int = 0
    top_entropy_quantile: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.01
    rollouts: str = "auto"
    recompute_logits: bool = False
    gpu_memory_utilization: float = 0.5
    vllm_importance_sampling_correction: bool = True
    full_finetuning: bool = False
    load_in_4bit: bool = False
    preflight_prompts: int = 32
    log_entropy: bool = True
    save_steps: int = 50
    sample_steps: int = 25
    report_to: str = "none"
    grade_seconds: float = 5.0
    lora: LoraSettings = field(default_factory=LoraSettings)
    seed: int = 3407

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {LOSS_TYPES}; got {self.loss_type!r}")
        if self.rollouts not in ROLLOUTS:
            raise ValueError(f"rollouts must be one of {ROLLOUTS}; got {self.rollouts!r}")
        for name, low, high in (
            ("epsilon", 0, 1),
            ("epsilon_high", 0, 10),
            ("min_p", 0, 1),
            ("top_p", 0, 1),
            ("warmup_ratio", 0, 1),
            ("gpu_memory_utilization", 0, 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be in [{low}, {high}]; got {getattr(self, name)}")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(
                "top_entropy_quantile must be in (0, 1] because it is a share of the tokens, and 1 is all of them; got "
                f"{self.top_entropy_quantile}"
            )
        for name in ("preflight_prompts", "sample_steps", "weight_decay", "max_resamples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0; got {getattr(self, name)}")
        for name in ("max_steps", "prompts_per_step", "max_completion_length", "max_prompt_length", "learning_rate",
                     "temperature", "save_steps", "grade_seconds"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0; got {getattr(self, name)}")
        if self.num_generations < 2:
            raise ValueError(
                "num_generations must be >= 2 because a completion's advantage is relative to its group; "
                f"got {self.num_generations}"
            )
        if self.beta < 0:
            raise ValueError(f"beta must be >= 0; got {self.beta}")
        check_penalty(self.kl_estimator, self.beta)
        check_credit(self.credit, self.kl_estimator, self.beta)
        if self.scale_rewards not in SCALE_REWARDS:
            raise ValueError(
                f"scale_rewards must be one of {SCALE_REWARDS}; got {self.scale_rewards!r}"
            )
        if self.reference not in REFERENCES:
            raise ValueError(
                f"reference must be one of {', '.join(REFERENCES)}; got {self.reference!r}"
            )
        if self.micro_batch_size is not None and (
            self.micro_batch_size < 1 or self.completions_per_step % self.micro_batch_size
        ):
            raise ValueError(
                f"micro_batch_size must divide the completions of a step ({self.prompts_per_step} prompts x "
                f"{self.num_generations} = {self.completions_per_step}); got {self.micro_batch_size}"
            )

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations


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

    Under torchrun every process calls this; they share each step's completions, and the first one writes.

    Args:
        config: settings.
        model_path: folder or hub id of the model below the adapter.
        rows: dicts with `problem` and `answer`.
        folder: gets `adapter/` (`model/` after full fine-tuning; complete or absent), `checkpoints/` while training,
            `metrics.jsonl`, a row each optimizer step,
            `completions.jsonl` and `preflight.json`.
        guide: shapes the KL anchor; None leaves it at π_ref.
        name: on the progress bar.
        adapter: start from this adapter instead of a fresh one; then π_ref is the model without it, `config.reference="base"`.

    Raises:
        ValueError: a row lacks a column or a value; a guide with β = 0; settings that contradict each other, or the number of
            processes; a folder of another run.
        ContractError: see `guided_kl`.
    """
    check_rows(rows, ("problem", "answer"))
    check_tracker(config.report_to)
    if guide is not None:
        check_guide(guide, config.beta)
    check_causal(config.credit, guide)
    check_teacher(frozenset() if guide is None else guide.needs, config.teacher or None)
    if (adapter is None) != (config.reference == "sft"):
        raise ValueError(
            "reference='base' trains on an adapter against the model without it, and reference='sft' trains a fresh one; "
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
            f"with vLLM a teacher must be a model, because Unsloth passes every adapter on to it; got the adapter {config.teacher}; "
            "merge it (python -m sage_unsloth export), or set rollouts=transformers"
        )
    settings |= {"guide": _guide_text(guide), "rollouts": rollouts}
    if adapter is not None:
        settings["adapter"] = model_identity(model_path, adapter)["adapter"]
    if config.teacher:
        settings["teacher"] = f"{Path(config.teacher).name} {model_identity(config.teacher)['weights']}"  # fmt: skip
    with locked(folder) if rank() == 0 else nullcontext():
        if rank() == 0:
            begin(folder, settings, config, model_path)
        return _rlvr(config, model_path, rows, Path(folder), guide, name, adapter, rollouts)


def _guide_text(guide: Guide | None) -> str:
    """What a run records of its guide: as it prints itself, or its class and attributes where that would be an address.

    A set among the attributes is written in order: Python's own order changes from one process to the next, and a run could not go on.
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
    os.environ["UNSLOTH_GRPO_LOGPROB_RECOMPUTE"] = "1" if config.recompute_logits else "0"
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
            trainer = _trainer(config, model, tokenizer, rows, folder, reward, rollouts)
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
                    extra=_extra(config, guide, folder, reward),
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


def _trainer(
    config: RlvrConfig,
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict],
    folder: Path,
    reward: SolutionReward,
    rollouts: str,
) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_list(
        [{"prompt": prompt_messages(row["problem"]), "answer": row["answer"]} for row in rows]
    )
    batch = config.completions_per_step // world_size()
    micro_batch = config.micro_batch_size or batch
    parts = None  # as Unsloth finds best for the memory there is
    if config.credit == "sequence":
        # A prompt's completions must meet in the loss; Unsloth computes their logits part by part.
        parts, micro_batch = batch // micro_batch if config.micro_batch_size else None, batch
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        train_dataset=data,
        args=GRPOConfig(
            max_steps=config.max_steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=batch // micro_batch,
            unsloth_grpo_mini_batch=parts,
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            learning_rate=config.learning_rate,
            warmup_steps=round(config.warmup_ratio * config.max_steps),
            weight_decay=config.weight_decay,
            beta=config.beta,
            loss_type=config.loss_type,
            # Explicit, because Unsloth fills in what is None by loss type, and TRL's defaults have changed before.
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            num_iterations=1,
            mask_truncated_completions=False,
            scale_rewards=config.scale_rewards,
            use_bias_correction_kl=config.kl_estimator == "k3-is",
            top_entropy_quantile=config.top_entropy_quantile,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=0,
            min_p=config.min_p or None,
            use_vllm=rollouts == "vllm",
            vllm_importance_sampling_correction=config.vllm_importance_sampling_correction,
            # TRL 1.15's default weighs whole completions, and long ones to nothing once min-p cuts the sampling distribution.
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=2.0,
            generation_kwargs=generation_arguments(rollouts, tokenizer.pad_token_id),
            seed=config.seed,
            **common_arguments(folder, config.report_to, config.save_steps),
        ),
    )
    if "ref" in getattr(model, "peft_config", {}):
        raise ValueError(
            "π_ref must be the model without its adapter; the trainer made a second adapter named 'ref' its reference; "
            "use the tested versions (python -m sage_unsloth doctor)"
        )
    if rollouts == "vllm":
        expected = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "max_tokens": config.max_completion_length,
            "logit_bias": {tokenizer.pad_token_id: -100.0},
        }
        check_calls(trainer.vllm_generation.llm, expected)
    return trainer


def _extra(
    config: RlvrConfig, guide: Guide | None, folder: Path, reward: SolutionReward
) -> Callable[[int, dict], dict[str, Any]]:
    """Stops a run whose first KL is not 0; adds the grades to the metrics, and now and then completions to their file."""

    def extra(step: int, logs: dict) -> dict[str, Any]:
        # Unsloth's own `kl` is the chosen penalty, and a guide's anchor is not the reference.
        plain = guide is None and config.kl_estimator in ("k3", "k3-is")
        kl = logs.get("kl/ref_k3", logs.get("kl") if plain else None)
        if step == 1 and config.reference == "sft" and kl is not None and abs(kl) > FIRST_KL_MAX:
            raise ValueError(
                "before the first step policy and reference must be one model, so that the KL between them is 0; got "
                f"{kl:.5f} nats per token, allowed {FIRST_KL_MAX:g}; was the folder of the model changed while it was loaded, "
                "or is this Unsloth not one of the tested versions (python -m sage_unsloth doctor)?"
            )
        if config.sample_steps and (step == 1 or step % config.sample_steps == 0):
            batch = gathered(reward.last_batch)
            if rank() == 0:
                append_jsonl(folder / COMPLETIONS, [{"step": step} | row for row in batch])
        counts = gathered([reward.pop_counts()])
        return {f"reward/{grade}": sum(of_one[grade] for of_one in counts) for grade in counts[0]}

    return extra


def _check_processes(config: RlvrConfig) -> None:
    """What one process can do and several cannot."""
    processes = world_size()
    if processes == 1:
        return
    share, rest = divmod(config.completions_per_step, processes)
    if rest or share % (config.micro_batch_size or 1):
        raise ValueError(
            f"the completions of a step ({config.completions_per_step}) must be divisible by the number of processes, and the "
            f"share of each by micro_batch_size; got WORLD_SIZE={processes} and micro_batch_size={config.micro_batch_size}; "
            "change prompts_per_step, micro_batch_size or the number of processes"
        )
    if config.credit == "sequence" and share % config.num_generations:
        raise ValueError(
            "credit='sequence' compares the completions of a prompt, so each process must have whole prompts: prompts_per_step "
            f"must be a multiple of the number of processes; got {config.prompts_per_step} and WORLD_SIZE={processes}"
        )
    if config.max_resamples or config.rollouts == "vllm":
        raise ValueError(
            "several processes need max_resamples=0, because groups may be split between them, and rollouts by transformers, because "
            f"vLLM inside each was not tried; got max_resamples={config.max_resamples} and rollouts={config.rollouts!r}; "
            "change these, or start without torchrun"
        )


def _check_golds(rows: Sequence[dict]) -> None:
    """A gold that is no answer would end the run at the step that meets it."""
    for number, row in enumerate(rows):
        if normalise(row["answer"]) is None:
            raise ValueError(
                f"a gold answer must be text that can be graded; row {number} has {row['answer']!r:.100}; drop or repair the row"
            )


def _refuse_long_prompts(tokenizer: Any, rows: Sequence[dict], limit: int) -> None:
    """A prompt over the limit would push the end of its completion out of what is scored."""
    lengths = [len(prompt_ids(tokenizer, row["problem"])) for row in rows]
    longer = [number for number, length in enumerate(lengths) if length > limit]
    if longer:
        raise ValueError(
            f"every prompt must fit max_prompt_length={limit} tokens; {len(longer)} of {len(rows)} do not, the first is row "
            f"{longer[0]} with {lengths[longer[0]]}; raise max_prompt_length, or drop these rows"
        )


def _warn_if_untrained(model: Any) -> None:
    """An adapter whose B is still 0 changes nothing: no group had a mixed reward, or the learning rate is 0."""
    sizes = [p.detach().abs().max().item() for n, p in model.named_parameters() if "lora_B" in n]
    if sizes and max(sizes) == 0:
        logger.warning(
            "The adapter is still zero, so the model has not changed: look at frac_reward_zero_std in metrics.jsonl; where it "
            "is 1, every group got one reward and there was nothing to learn from. Easier problems or more SFT help."
        )
