"""The two training stages: supervised fine-tuning, then RL with verifiable rewards through Unsloth's fast GRPO loss.

Both are functions of a config, rows and a folder, which refuses other settings. A stage that is complete returns at once. RL that
was killed goes on from its last checkpoint, with the same guide values, data order and random state; SFT starts again.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.guides import Guide
from sage_unsloth.models import LoraSettings, has_gpu, load_policy, save_merged
from sage_unsloth.patch import check_guide, check_penalty, guided_kl
from sage_unsloth.prompts import prompt_messages, render_prompt, solution_text
from sage_unsloth.records import append_jsonl, open_run, read_jsonl
from sage_unsloth.rewards import Grader, SolutionReward

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Stage 1 (Table 7); the values are the paper's where it gives one.

    Attributes:
        max_steps: optimizer steps; -1 trains `epochs` epochs.
        epochs: passes over the rows.
        batch_size: rows in an optimizer step.
        learning_rate: peak; linear decay.
        warmup_steps: optimizer steps.
        weight_decay: of AdamW.
        max_length: tokens of prompt and solution together.
        lora: the adapter.
        seed: of adapter and data order.
    """

    max_steps: int = -1
    epochs: int = 2
    batch_size: int = 1
    learning_rate: float = 2e-4
    warmup_steps: int = 5
    weight_decay: float = 0.01
    max_length: int = 2048
    lora: LoraSettings = field(default_factory=LoraSettings)
    seed: int = 3407


@dataclass(frozen=True, kw_only=True)
class RlvrConfig:
    """Stage 2 (Table 8); the values are the paper's where it gives one.

    Attributes:
        max_steps: optimizer steps.
        prompts_per_step: different problems in a step.
        num_generations: completions sampled for each problem.
        max_completion_length: tokens.
        max_prompt_length: tokens; longer prompts are refused.
        learning_rate: peak; linear decay after `warmup_ratio` of the steps.
        weight_decay: of AdamW.
        beta: KL coefficient β.
        loss_type: how token losses are reduced ("grpo", "bnpo", "dr_grpo", "dapo").
        epsilon, epsilon_high: clip range of the importance ratio.
        kl_estimator: the KL penalty, one of `sage_unsloth.losses.KL_ESTIMATORS`; "k3" is the paper's.
        temperature, top_p, min_p: sampling.
        save_steps: optimizer steps between checkpoints.
        grade_seconds: time limit for grading one answer.
        lora: the adapter.
        seed: of adapter, data order, rollouts and the guide's noise.
    """

    max_steps: int = 1000
    prompts_per_step: int = 1
    num_generations: int = 8
    max_completion_length: int = 1024
    max_prompt_length: int = 1024
    learning_rate: float = 5e-6
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    beta: float = 0.05
    loss_type: str = "grpo"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    kl_estimator: str = "k3"
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.01
    save_steps: int = 50
    grade_seconds: float = 5.0
    lora: LoraSettings = field(default_factory=LoraSettings)
    seed: int = 3407

    def __post_init__(self) -> None:
        check_penalty(self.kl_estimator, self.beta)


def sft(
    config: SftConfig, model_path: str | Path, rows: Sequence[dict], folder: str | Path
) -> Path:
    """Fine-tune on worked solutions and return the folder of the merged model.

    The loss covers the completion only: working out, solution tag and EOS. The adapter is merged, so that RL starts from
    this model and its reference, "adapter off", is this model too.

    Args:
        rows: dicts with `problem`, `solution` (the working out) and `answer`.
        folder: gets `model/` (complete or absent) and `metrics.jsonl`.

    Raises:
        ValueError: a row lacks a column or a value.
    """
    check_rows(rows, ("problem", "solution", "answer"))
    folder = open_run(folder, _settings("sft", config, model_path, rows))
    merged = folder / "model"
    if merged.exists():
        logger.info("SFT is complete: %s", merged)
        return merged
    model, tokenizer = load_policy(
        model_path, lora=config.lora, max_length=config.max_length, seed=config.seed
    )

    from datasets import Dataset
    from trl import SFTConfig

    data = Dataset.from_list(
        [
            {
                "prompt": prompt_messages(row["problem"]),
                "completion": [
                    {"role": "assistant", "content": solution_text(row["solution"], row["answer"])}
                ],
            }
            for row in rows
        ]
    )
    trainer = _sft_trainer_class()(
        model=model,
        processing_class=tokenizer,
        train_dataset=data,
        args=SFTConfig(
            output_dir=str(folder / "checkpoints"),
            max_steps=config.max_steps,
            num_train_epochs=config.epochs,
            per_device_train_batch_size=config.batch_size,
            gradient_accumulation_steps=1,
            learning_rate=config.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            max_length=config.max_length,
            completion_only_loss=True,
            packing=False,
            optim=_optimizer(),
            seed=config.seed,
            **_common_arguments(),
        ),
    )
    _assert_eos_is_learned(trainer, tokenizer, len(rows))
    _train(trainer, folder, "SFT", resume=None)
    save_merged(trainer.model, tokenizer, merged)
    return merged


def rlvr(
    config: RlvrConfig,
    model_path: str | Path,
    rows: Sequence[dict],
    folder: str | Path,
    guide: Guide | None = None,
    name: str = "GRPO",
) -> Path:
    """Train an adapter by GRPO with verifiable rewards and return its folder.

    Args:
        model_path: the model to start from, which is also π_ref.
        rows: dicts with `problem` and `answer`.
        folder: gets `adapter/` (complete or absent), `checkpoints/` while training, and `metrics.jsonl`: a row each
            optimizer step; after a resume the last row of a step counts (`read_metrics`).
        guide: shapes the KL anchor; None with the estimator "k3" or "k3-is" is Unsloth's GRPO, unpatched.
        name: on the progress bar.

    Raises:
        ValueError: a row lacks a column or a value; or a guide with β = 0.
        ContractError: see `guided_kl`.
    """
    check_rows(rows, ("problem", "answer"))
    if guide is not None:
        check_guide(guide, config.beta)
    folder = open_run(folder, _settings("rlvr", config, model_path, rows) | {"guide": repr(guide)})
    adapter, checkpoints = folder / "adapter", folder / "checkpoints"
    if adapter.exists():
        logger.info("%s is complete: %s", name, adapter)
        shutil.rmtree(checkpoints, ignore_errors=True)
        return adapter
    length = config.max_prompt_length + config.max_completion_length
    model, tokenizer = load_policy(
        model_path, lora=config.lora, max_length=length, seed=config.seed
    )

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_list(
        [{"prompt": prompt_messages(row["problem"]), "answer": row["answer"]} for row in rows]
    )
    _refuse_long_prompts(tokenizer, rows, config.max_prompt_length)
    resume = _last_checkpoint(checkpoints)
    with Grader(time_limit=config.grade_seconds) as grader:
        reward = SolutionReward(grader)
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[reward],
            train_dataset=data,
            args=GRPOConfig(
                output_dir=str(checkpoints),
                max_steps=config.max_steps,
                per_device_train_batch_size=config.prompts_per_step * config.num_generations,
                gradient_accumulation_steps=1,
                num_generations=config.num_generations,
                max_completion_length=config.max_completion_length,
                learning_rate=config.learning_rate,
                lr_scheduler_type="linear",
                warmup_steps=round(config.warmup_ratio * config.max_steps),
                weight_decay=config.weight_decay,
                beta=config.beta,
                loss_type=config.loss_type,
                # Explicit, because Unsloth fills in what is None by loss type, and TRL's defaults have changed before.
                epsilon=config.epsilon,
                epsilon_high=config.epsilon_high,
                mask_truncated_completions=False,
                scale_rewards="group",
                use_bias_correction_kl=config.kl_estimator == "k3-is",
                temperature=config.temperature,
                top_p=config.top_p,
                min_p=config.min_p or None,
                # A sampled pad token would be taken for the end of the completion.
                generation_kwargs={"suppress_tokens": [tokenizer.pad_token_id]},
                optim=_optimizer(),
                seed=config.seed,
                save_strategy="steps",
                save_steps=config.save_steps,
                save_total_limit=2,
                **_common_arguments(save_strategy=None),
            ),
        )
        partial = folder / "adapter.partial"
        if resume is not None and _step_of(resume) >= config.max_steps:
            # Killed between the last checkpoint and the adapter: there is nothing left to train.
            partial.mkdir(exist_ok=True)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(resume / file, partial / file)
        else:
            with guided_kl(trainer, guide, kl_estimator=config.kl_estimator):
                _train(trainer, folder, name, resume=resume, reward=reward)
            trainer.model.save_pretrained(partial)
    partial.rename(adapter)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return adapter


def _settings(
    stage: str, config: Any, model_path: str | Path, rows: Sequence[dict]
) -> dict[str, Any]:
    """What a folder must agree in before a stage goes on in it; rows by a digest of their content."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"the stages run in one process; got WORLD_SIZE={os.environ['WORLD_SIZE']}; start them without torchrun"
        )
    digest = hashlib.sha256(
        json.dumps([dict(row) for row in rows], sort_keys=True).encode()
    ).hexdigest()
    return {"stage": stage, "model": Path(model_path).name, "rows": digest[:16]} | asdict(config)


def _refuse_long_prompts(tokenizer: Any, rows: Sequence[dict], limit: int) -> None:
    """A prompt over the limit would push the end of its completion out of what is scored."""
    lengths = [
        len(tokenizer(render_prompt(tokenizer, row["problem"]))["input_ids"]) for row in rows
    ]
    longer = [number for number, length in enumerate(lengths) if length > limit]
    if longer:
        raise ValueError(
            f"every prompt must fit max_prompt_length={limit} tokens; {len(longer)} of {len(rows)} do not, the first is row "
            f"{longer[0]} with {lengths[longer[0]]}; raise max_prompt_length, or drop these rows"
        )


def check_rows(rows: Sequence[dict], columns: Sequence[str]) -> None:
    """Each row must have a non-empty text in each column.

    Raises:
        ValueError: naming the row, the column, and what the row has instead.
    """
    if not rows:
        raise ValueError("training needs at least one row; got none")
    for number, row in enumerate(rows):
        for column in columns:
            if column not in row:
                raise ValueError(
                    f"every row must have the columns {', '.join(columns)}; row {number} lacks {column!r} and has "
                    f"{sorted(row)}; rename the column that holds it"
                )
            if not isinstance(row[column], str) or not row[column].strip():
                raise ValueError(
                    f"{column!r} must be a non-empty text; row {number} has {row[column]!r}; drop or repair the row"
                )


def read_metrics(folder: str | Path) -> list[dict]:
    """The rows of a training run's `metrics.jsonl`, one per optimizer step; a repeated step counts as last written."""
    rows = {row["step"]: row for row in read_jsonl(Path(folder) / METRICS)}
    return [rows[step] for step in sorted(rows)]


def _common_arguments(**overrides: Any) -> dict[str, Any]:
    """What both trainers get; entries overridden with None are left out."""
    arguments = {
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": not has_gpu(),
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": has_gpu(),
    }
    if not has_gpu():
        arguments |= {"bf16": False, "fp16": False}
    return {key: value for key, value in (arguments | overrides).items() if value is not None}


def _optimizer() -> str:
    return "adamw_8bit" if has_gpu() else "adamw_torch"


def _sft_trainer_class() -> type:
    """The trainer that `trl` has (Unsloth's on a GPU); without one, TRL's that takes the model's own loss, since TRL 1.15 computes it in a Triton kernel."""
    from transformers import Trainer
    from trl import SFTTrainer

    if has_gpu():
        return SFTTrainer

    class CpuSFTTrainer(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return Trainer.compute_loss(self, *args, **kwargs)

    return CpuSFTTrainer


def _assert_eos_is_learned(trainer: Any, tokenizer: Any, num_rows: int) -> None:
    """A model that was never shown the end of a solution never ends one; a row cut at max_length has lost it."""
    data = trainer.train_dataset
    if len(data) != num_rows:
        raise ValueError(
            f"every prompt must leave room for its solution; {num_rows - len(data)} of {num_rows} rows do not; raise max_length"
        )
    for number, row in enumerate(data):
        last = trainer.data_collator([row])["labels"][0]
        last = int(last[last != -100][-1])
        if last != tokenizer.eos_token_id:
            raise ValueError(
                f"the last label of a solution must be EOS ({tokenizer.eos_token_id}); row {number} ends in {last} "
                f"({tokenizer.decode([last])!r}); raise max_length, or check the chat template"
            )


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint with everything that resuming reads; one cut short by a kill is passed over."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    for path in sorted(found, key=_step_of, reverse=True):
        if _is_complete(path):
            return path
        logger.warning("checkpoint %s is incomplete and is passed over", path)
    return None


def _is_complete(checkpoint: Path) -> bool:
    """Whether every file is there; the trainer's state is written last, so a kill leaves it absent or cut short."""
    needed = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors")
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (FileNotFoundError, ValueError):
        return False
    return all((checkpoint / name).exists() for name in needed)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _train(
    trainer: Any,
    folder: Path,
    name: str,
    *,
    resume: Path | None,
    reward: SolutionReward | None = None,
) -> None:
    """Run `trainer.train()` with a progress bar and every step's metrics on disk before the next step."""
    from tqdm.auto import tqdm
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    folder.mkdir(parents=True, exist_ok=True)

    class Log(TrainerCallback):
        bar: Any = None

        def on_train_begin(self, args, state, control, **kwargs):
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=name, unit="step"
            )

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" not in logs:
                return
            counts = (
                {f"reward/{grade}": n for grade, n in reward.pop_counts().items()} if reward else {}
            )
            append_jsonl(folder / METRICS, [{"step": state.global_step} | _numbers(logs) | counts])
            shown = {key: logs[key] for key in ("loss", "reward", "kl") if key in logs}
            self.bar.set_postfix({key: f"{float(value):.3f}" for key, value in shown.items()})
            self.bar.update(state.global_step - self.bar.n)

        def on_train_end(self, args, state, control, **kwargs):
            self.bar.close()

    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    trainer.add_callback(Log())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))


def _numbers(logs: dict) -> dict[str, float]:
    """Trainers log some numbers as text, for display; the file holds numbers."""
    result = {}
    for key, value in logs.items():
        try:
            result[key] = float(value)
        except (TypeError, ValueError):
            result[key] = value
    return result
