"""What the losses are measured on: a model with random weights, a trainer, a batch.

The model has one layer, so that the output head dominates as it does in the loss of a large one.
Its weights are random, since no figure depends on their values.

Shapes: B completions, P prompt tokens, T completion tokens, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.cost.sizes import Size
from research.data import DATA
from sage_unsloth.models.embedded import BASE_MODEL
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.models.random_weights import save_random_model
from sage_unsloth.patch.rollout_batch import GROUPS_KEY, KEY_PREFIX
from sage_unsloth.planning.presets import PAPER_BETA
from sage_unsloth.problems import arithmetic
from sage_unsloth.prompts import prompt_messages

PROMPT_TOKENS = 16


class Place:
    """Models and trainers in a temporary folder; each model is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, hidden: int, vocabulary: int) -> Path:
        path = self.folder / f"model-{hidden}-{vocabulary}"
        if path.exists():
            return path
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        return save_random_model(path, hidden, vocabulary, dtype=dtype)

    def trainer(self, size: Size, **settings: Any) -> Any:
        """Over the random model of that size."""
        return make_trainer(
            self.model(size.hidden, size.vocabulary),
            self.folder / "out",
            rewards=token_sum_rewards,
            rows=arithmetic.problems("train"),
            completions=size.batch,
            length=size.length,
            **settings,
        )

    def embedded_trainer(self, rewards: Callable[..., list[float]]) -> Any:
        """Over the embedded model, with rewards of its own."""
        return make_trainer(
            DATA / BASE_MODEL,
            self.folder / "out",
            rewards=rewards,
            rows=arithmetic.problems("train"),
            completions=64,
            length=48,
        )


def make_trainer(
    model_folder: str | Path,
    output_dir: str | Path,
    *,
    rewards: Callable[..., list[float]],
    rows: list[dict],
    completions: int,
    length: int,
    **settings: Any,
) -> Any:
    """The backend's trainer over a fresh adapter.

    Its learning rate is 0, so that every variant draws the same rollouts.

    Args:
        rewards: TRL's reward function.
        rows: with `problem` and `answer`.
        completions: of one forward and backward pass, 8 to a prompt where there are as many.
        length: completion tokens, at most.
        settings: of GRPOConfig, in place of these.
    """
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load_policy(
        model_folder, lora=LoraSettings(), max_length=length + 8 * PROMPT_TOKENS
    )
    gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = dict(
        output_dir=str(output_dir),
        per_device_train_batch_size=completions,
        num_generations=min(8, completions),
        gradient_accumulation_steps=1,
        max_steps=1000,
        max_completion_length=length,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        beta=PAPER_BETA,
        loss_type="grpo",
        use_bias_correction_kl=False,
        learning_rate=0.0,
        weight_decay=0.0,
        optim="adamw_torch",
        use_cpu=not gpu,
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=gpu,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=3407,
        max_grad_norm=1.0,
        generation_kwargs={"suppress_tokens": [tokenizer.pad_token_id]},
    )
    if not gpu:
        arguments |= {"bf16": False, "fp16": False}
    data = [{"prompt": prompt_messages(r["problem"]), "answer": r["answer"]} for r in rows]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[rewards],  # pyright: ignore[reportArgumentType]
        args=GRPOConfig(**(arguments | settings)),
        train_dataset=Dataset.from_list(data),
    )
    trainer.remove_callback(PrinterCallback)
    # As `train` sets it; the loss is also called without.
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def make_batch(trainer: Any, batch_size: int, length: int, vocab_size: int) -> dict[str, Any]:
    """What the trainer's loss gets from a rollout: random tokens and alternating advantages.

    The reference's log probabilities are near uniform.
    """
    generator = torch.Generator().manual_seed(0)
    device = trainer.accelerator.device
    pad = trainer.processing_class.pad_token_id

    def tokens(count: int) -> Tensor:
        ids = torch.randint(vocab_size - 1, (batch_size, count), generator=generator)
        return (ids + (ids >= pad)).to(device)  # every id but pad

    near_uniform = -torch.log(torch.tensor(float(vocab_size)))
    noise = torch.randn(batch_size, length, generator=generator)
    signs = torch.tensor([1.0, -1.0]).repeat(batch_size)[:batch_size]
    return {
        "prompt_ids": tokens(PROMPT_TOKENS),
        "prompt_mask": torch.ones(batch_size, PROMPT_TOKENS, dtype=torch.long, device=device),
        "completion_ids": tokens(length),
        "completion_mask": torch.ones(batch_size, length, dtype=torch.long, device=device),
        "ref_per_token_logps": (near_uniform + 0.1 * noise).to(device),
        "advantages": signs.to(device),
        "num_items_in_batch": torch.tensor(batch_size * length, device=device),
        # What a rollout batch carries for the guides that need it.
        f"{KEY_PREFIX}ref_entropies": (-near_uniform + 0.1 * noise).to(device),
        GROUPS_KEY: torch.zeros(batch_size, dtype=torch.long, device=device),
        "max_left_pad": 0,
    }


def token_sum_rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that costs nothing and differs in a group: the sum of a completion's ids, mod 5."""
    return [float(sum(ids) % 5) for ids in completion_ids]
