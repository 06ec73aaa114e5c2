"""Stage 1: supervised fine-tuning on worked solutions, which teaches the format that RL grades.

A stage is a function of a config, a model, rows and a folder. A complete folder returns at once; a
killed run resumes from its last checkpoint; a folder with other settings is refused.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import frees_models, has_gpu, release_memory
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.merging import save_merged
from sage_unsloth.models.quantised import is_quantised
from sage_unsloth.models.templates import check_teaches, turn_end
from sage_unsloth.models.tokenizers import stop_tokens
from sage_unsloth.models.trained import write_readme
from sage_unsloth.prompts import PromptFormat, row_messages, taught_tokens
from sage_unsloth.runs.checkpoints import copy_result, last_checkpoint, trained_adapter
from sage_unsloth.runs.files import whole_folder
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.settings import values_where
from sage_unsloth.trainers.finite import finite_only
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.training.ledger import Ledger
from sage_unsloth.training.number_formats import dtype_of_weights
from sage_unsloth.training.sft_config import SftConfig as SftConfig
from sage_unsloth.training.stage import (
    check_rows,
    check_tracker,
    common_arguments,
    run_settings,
    run_trainer,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftJob:
    """The checked arguments of `resolve_sft`."""

    config: SftConfig
    model_path: str | Path
    rows: Sequence[dict]
    folder: Path
    data: Mapping[str, Any] | None = None
    command: tuple[str, ...] = ()
    tokenizer: Any = field(default=None, compare=False, repr=False)


def sft(
    config: SftConfig,
    model_path: str | Path,
    rows: Sequence[dict],
    folder: str | Path,
    **others: Any,
) -> Path:
    """Fine-tunes on worked solutions and returns the folder of the merged model.

    This is `resolve_sft`, which documents the arguments, then `run_sft_job`. The adapter is merged,
    so that this model is both the start of RL and its reference ("adapter off"). The adapter is
    also saved, for RL against the base model. After training on 4-bit weights it is merged into the
    original model; if RL quantises that again, it starts a quantisation error away from the trained
    policy.
    """
    return run_sft_job(resolve_sft(config, model_path, rows, folder, **others))


def resolve_sft(
    config: SftConfig,
    model_path: str | Path,
    rows: Sequence[dict],
    folder: str | Path,
    *,
    data: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    tokenizer: Any = None,
    judged: bool = False,
) -> SftJob:
    """Checks the arguments of stage 1 before Unsloth or a model is loaded.

    Args:
        rows: dicts with `problem` (or `messages`, a conversation), `solution` (the reasoning) and
            `answer`; without `answer` the solution is trained on as it is, tags included.
        folder: gets `adapter/` and `model/` (each complete or absent), `metrics.jsonl`, and
            `checkpoints/` while training.
        data: origin of the rows, for `run.json`, as in `Corpus.record`.
        command: the words of the command, for `run.json`.
        tokenizer: of the model (`load_tokenizer`); None loads it.
        judged: settings have been checked already.

    Raises:
        ValueError: an invalid row, or one that does not fit; a folder of another run; the EOS is
            not learned.
    """
    answered = any("answer" in row for row in rows)
    check_rows(rows, ("problem", "solution", *(("answer",) if answered else ())))
    if config.template == "project":
        check_begins(config.prompt, rows)
    if not judged:
        check_tracker(config.report_to)
    return SftJob(config, model_path, rows, Path(folder), data, tuple(command), tokenizer)


@frees_models
def run_sft_job(job: SftJob) -> Path:
    """Opens the folder of a resolved job and trains there, or returns its finished result."""
    settings = run_settings("sft", job.config, job.model_path, job.rows)
    ledger = Ledger(job.folder, "sft")
    with exclusive_lock(job.folder):
        ledger.begin(settings, job.config, job.model_path, job.data, job.command)
        return _sft(job, ledger)


def check_begins(prompt: PromptFormat, rows: Sequence[dict]) -> None:
    """Raises ValueError for a solution without an answer that lacks the tag which the project's
    template opens.
    """
    if prompt.reasoning is None:
        return
    opened = prompt.reasoning[0]
    for number, row in enumerate(rows):
        if "answer" not in row and not row["solution"].startswith(opened):
            raise ValueError(
                f"the project's template opens the working by {opened}, so a solution without an "
                f"answer must begin with that, but row {number} begins with "
                f"{row['solution'][:40]!r}. Give an answer column or --answer-pattern, take --tags "
                "boxed, or --template model"
            )


def _sft(job: SftJob, ledger: Ledger) -> Path:
    """`run_sft_job` with the folder locked."""
    config, model_path, folder = job.config, job.model_path, job.folder
    merged, adapter = folder / "model", folder / "adapter"
    if merged.exists():
        ledger.complete(merged)
        logger.info("SFT is complete: %s", merged)
        return merged
    resume = last_checkpoint(ledger.checkpoints)
    trained = trained_adapter(folder, resume)  # if it exists, only the merge is left
    if trained is None:
        ledger.check_checkpoints(resume, config.save_steps)
    model, tokenizer = load_policy(
        model_path,
        lora=config.lora,
        adapter=trained,
        max_length=config.max_length,
        load_in_4bit=config.load_in_4bit,
        dtype=dtype_of_weights(config.precision),
        seed=config.seed,
        template=config.template,
        prompt=config.prompt,
        tokenizer=job.tokenizer,
    )
    # Before training: a template that ends with another token would teach never to stop.
    stops = stop_tokens(model.generation_config, tokenizer)
    check_teaches(tokenizer, stops, model_path, config.prompt)
    if not adapter.exists():
        if trained is None:
            use_cache = model.config.use_cache
            # Padding and truncation are the trainer's to set in its own.
            trainer = _trainer(config, model, copy.deepcopy(tokenizer), job.rows, folder)
            with finite_only(trainer):
                run_trainer(trainer, folder, "SFT", resume=resume, report_to=config.report_to)
            model = trainer.model
            # Training turns the cache off, and the merged model would be saved without it.
            model.config.use_cache = use_cache
        with whole_folder(adapter) as partial:
            # Without training now, the last checkpoint has the adapter.
            if trained is None:
                model.save_pretrained(partial)
            else:
                copy_result(trained, partial)
            write_readme(partial)
    # On a GPU Unsloth merges into the original weights; here they must be loaded again.
    if is_quantised(model) and not has_gpu():
        # Both names hold the weights, which the next load needs the memory of.
        model = trainer = None
        release_memory()
        model, _ = load_policy(model_path, adapter=adapter, tokenizer=tokenizer)
    save_merged(model, tokenizer, merged)
    ledger.complete(merged)
    return merged


def _trainer(
    config: SftConfig, model: Any, tokenizer: Any, rows: Sequence[dict], folder: Path
) -> Any:
    import trl
    from datasets import Dataset

    # On a GPU its classes are Unsloth's.
    generated: Any = trl
    data = Dataset.from_list(
        [
            {name: ids[: config.max_length] for name, ids in tokens.items()}
            for tokens in (taught_tokens(tokenizer, row, config.prompt) for row in rows)
        ]
    )
    micro_batch = config.micro_batch_size or config.batch_size
    trainer = sft_trainer_class()(
        model=model,
        processing_class=tokenizer,
        train_dataset=data,
        args=generated.SFTConfig(
            num_train_epochs=config.epochs,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=config.batch_size // micro_batch,
            # Packed rows would see each other where attention is not masked by row.
            packing=False,
            **values_where(config, "trainer"),
            **common_arguments(folder, config.save_steps, config.precision, config.optim),
        ),
    )
    _assert_eos_is_learned(trainer, tokenizer, len(rows))
    return trainer


def taught_row(row: dict, prompt: PromptFormat) -> dict[str, list]:
    """A row for TRL's SFT trainer: prompt and completion."""
    completion = [{"role": "assistant", "content": prompt.taught(row)}]
    return {"prompt": row_messages(row), "completion": completion}


def sft_trainer_class() -> type:
    """`trl`'s SFT trainer; without a GPU one with the model's own loss and a float32 adapter.

    TRL 1.15 computes the loss in a Triton kernel. It also rounds an adapter on 4-bit weights to
    bfloat16, in which most updates at a rate of 2e-4 are lost; Unsloth's trainers do not.
    """
    import trl
    from transformers import Trainer

    generated: Any = trl
    if has_gpu():
        return generated.SFTTrainer

    class CpuSFTTrainer(generated.SFTTrainer):
        def __init__(self, *, model, **kwargs):
            base = model.get_base_model()
            # TRL reads this to cast the adapter to bfloat16.
            with replace_attributes(base, is_loaded_in_4bit=False):
                super().__init__(model=model, **kwargs)

        def compute_loss(self, *args, **kwargs):
            return Trainer.compute_loss(self, *args, **kwargs)

    return CpuSFTTrainer


def _assert_eos_is_learned(trainer: Any, tokenizer: Any, num_rows: int) -> None:
    """Raises ValueError if a row has no EOS to learn: the model would never end a solution."""
    data = trainer.train_dataset
    if len(data) != num_rows:
        raise ValueError(
            f"every prompt must leave room for its solution, but {num_rows - len(data)} of "
            f"{num_rows} rows do not. Raise max_length"
        )
    # EOS, and what the model's own template adds after it.
    end = turn_end(tokenizer)
    for number, row in enumerate(data):
        # The collator's labels and not the text, since truncation and masks happen there.
        labels = trainer.data_collator([row])["labels"][0]
        last = labels[labels != -100][-len(end) :].tolist()
        if last != end:
            raise ValueError(
                f"the last label of a solution must be EOS ({tokenizer.decode(end)!r}), but row "
                f"{number} ends in {tokenizer.decode(last)!r}. Raise max_length, or check the chat "
                "template"
            )
