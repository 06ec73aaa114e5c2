"""Stage 1: supervised fine-tuning on worked solutions, which teaches the format that RL grades.

A stage is a function of a config, a model, rows and a folder. A complete folder returns at once; a
run that was killed resumes from its last checkpoint; a folder with other settings is refused.
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
from sage_unsloth.prompts import PromptFormat, turns_of
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
    train,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftJob:
    """The arguments of `resolve`, judged."""

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
    """Fine-tune on worked solutions and return the folder of the merged model: `resolve`, which has
    the arguments, then `run_job`.

    The adapter is merged, so that RL starts from this model and its reference, "adapter off", is
    this model too. It is also kept by itself, for RL against the base model. One that was trained
    on 4-bit weights is merged into the model before it was quantised: RL may quantise that again,
    and begins a quantisation away from the policy that was trained.
    """
    return run_job(resolve(config, model_path, rows, folder, **others))


def resolve(
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
    """Judge what stage 1 is asked for, before Unsloth or a model is loaded.

    Args:
        config: settings.
        model_path: folder or hub id.
        rows: dicts with `problem` (or `messages`, a conversation), `solution` (the working out)
            and `answer`; without `answer` the solution is taught as it is, tags and all.
        folder: gets `adapter/` and `model/` (each complete or absent), `metrics.jsonl`, and
            `checkpoints/` while training.
        data: where the rows are from, for `run.json`, as `Corpus.record` has it.
        command: the words that started it, for `run.json`.
        tokenizer: of the model (`load_tokenizer`); None loads it.
        judged: settings were judged already.

    Raises:
        ValueError: a row lacks a column or a value, or does not fit; the folder is of another run;
            the EOS is not learned.
    """
    answered = any("answer" in row for row in rows)
    check_rows(rows, ("problem", "solution", *(("answer",) if answered else ())))
    _check_begins(config, rows)
    if not judged:
        check_tracker(config.report_to)
    return SftJob(config, model_path, rows, Path(folder), data, tuple(command), tokenizer)


@frees_models
def run_job(job: SftJob) -> Path:
    """Train what `resolve` gave: open the folder for it, then train there, or return its result."""
    settings = run_settings("sft", job.config, job.model_path, job.rows)
    ledger = Ledger(job.folder, "sft")
    with exclusive_lock(job.folder):
        ledger.begin(settings, job.config, job.model_path, job.data, job.command)
        return _sft(job, ledger)


def _check_begins(config: SftConfig, rows: Sequence[dict]) -> None:
    """A solution that is taught as it is must begin where the prompt ends: in the opened tag.

    Raises:
        ValueError: it does not, with the row.
    """
    if config.template != "project" or config.prompt.reasoning is None:
        return
    opened = config.prompt.reasoning[0]
    for number, row in enumerate(rows):
        if "answer" not in row and not row["solution"].startswith(opened):
            raise ValueError(
                f"the project's template opens the working by {opened}, so a solution without an "
                f"answer, which is taught as it is, must begin with that; row {number} begins with "
                f"{row['solution'][:40]!r}; give an answer column or --answer-pattern, take --tags "
                "boxed, or --template model"
            )


def _sft(job: SftJob, ledger: Ledger) -> Path:
    """`run_job` once the folder is this process's own."""
    config, model_path, folder = job.config, job.model_path, job.folder
    merged, adapter = folder / "model", folder / "adapter"
    if merged.exists():
        ledger.complete(merged)
        logger.info("SFT is complete: %s", merged)
        return merged
    resume = last_checkpoint(ledger.checkpoints)
    trained = trained_adapter(folder, resume)  # where it is there, only the merge is left
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
    stops = stop_tokens(model.generation_config, tokenizer)
    check_teaches(tokenizer, stops, model_path, config.prompt)
    if not adapter.exists():
        if trained is None:
            use_cache = model.config.use_cache
            # Padding and truncation are the trainer's to set in its own.
            trainer = _trainer(config, model, copy.deepcopy(tokenizer), job.rows, folder)
            with finite_only(trainer):
                train(trainer, folder, "SFT", resume=resume, report_to=config.report_to)
            model = trainer.model
            model.config.use_cache = use_cache  # training turns it off
        with whole_folder(adapter) as partial:
            if trained is None:
                model.save_pretrained(partial)
            else:
                copy_result(trained, partial)
            write_readme(partial)
    if is_quantised(model) and not has_gpu():  # on a GPU Unsloth does so by itself
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

    generated: Any = trl  # on a GPU its classes are Unsloth's
    data = Dataset.from_list([taught_row(row, config.prompt) for row in rows])
    micro_batch = config.micro_batch_size or config.batch_size
    trainer = sft_trainer_class()(
        model=model,
        processing_class=tokenizer,
        train_dataset=data,
        args=generated.SFTConfig(
            num_train_epochs=config.epochs,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=config.batch_size // micro_batch,
            packing=False,
            **values_where(config, "trainer"),
            **common_arguments(folder, config.save_steps, config.precision, config.optim),
        ),
    )
    _assert_eos_is_learned(trainer, tokenizer, len(rows))
    return trainer


def taught_row(row: dict, prompt: PromptFormat) -> dict[str, list]:
    """A row as TRL's SFT trainer takes it: what is asked, and what is learned."""
    completion = [{"role": "assistant", "content": prompt.taught(row)}]
    return {"prompt": turns_of(row), "completion": completion}


def sft_trainer_class() -> type:
    """`trl`'s SFT trainer; without a GPU one that takes the model's own loss, since TRL 1.15
    computes it in a Triton kernel, and that leaves an adapter on 4-bit weights in float32. TRL
    rounds it to bfloat16, where most steps of 2e-4 are lost; Unsloth's trainers do not.
    """
    import trl
    from transformers import Trainer

    generated: Any = trl
    if has_gpu():
        return generated.SFTTrainer

    class CpuSFTTrainer(generated.SFTTrainer):
        def __init__(self, *, model, **kwargs):
            base = model.get_base_model()
            with replace_attributes(base, is_loaded_in_4bit=False):
                super().__init__(model=model, **kwargs)

        def compute_loss(self, *args, **kwargs):
            return Trainer.compute_loss(self, *args, **kwargs)

    return CpuSFTTrainer


def _assert_eos_is_learned(trainer: Any, tokenizer: Any, num_rows: int) -> None:
    """A model that is never shown EOS never ends a solution; a row cut at max_length has none."""
    data = trainer.train_dataset
    if len(data) != num_rows:
        raise ValueError(
            f"every prompt must leave room for its solution; {num_rows - len(data)} of {num_rows} "
            "rows do not; raise max_length"
        )
    end = turn_end(tokenizer)  # EOS, and what a model's own template puts behind it
    for number, row in enumerate(data):
        labels = trainer.data_collator([row])["labels"][0]
        last = labels[labels != -100][-len(end) :].tolist()
        if last != end:
            raise ValueError(
                f"the last label of a solution must be EOS ({tokenizer.decode(end)!r}); row "
                f"{number} ends in {tokenizer.decode(last)!r}; raise max_length, or check the chat "
                "template"
            )
