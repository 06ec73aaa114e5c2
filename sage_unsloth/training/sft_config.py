"""The settings of stage 1 (Table 7)."""

from dataclasses import dataclass
from typing import Literal

from sage_unsloth.models.lora import LoraSettings
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat
from sage_unsloth.runs.settings import (
    DATA,
    MODEL,
    OBJECTIVE,
    OPTIMISER,
    SAVING,
    check_settings,
    documented,
    setting,
)


@documented
@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Stage 1 (Table 7); the values are the paper's where it gives one."""

    max_steps: int = setting(-1, "optimizer steps; -1: by epochs", OPTIMISER)
    epochs: int = setting(2, "passes over the rows", OPTIMISER, above=0)
    batch_size: int = setting(1, "rows in an optimizer step", OPTIMISER, above=0)
    micro_batch_size: int | None = setting(
        None, "rows that go through the model together, none: all of a step", OPTIMISER
    )
    learning_rate: float = setting(2e-4, "peak learning rate", OPTIMISER, above=0)
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"
    ] = setting("linear", "how the learning rate falls after its peak", OPTIMISER)
    warmup_steps: int = setting(5, "steps in which the learning rate rises", OPTIMISER, low=0)
    optim: str = setting(
        "auto",
        "optimizer, as transformers names it; auto: adamw_8bit on a GPU, else adamw_torch",
        OPTIMISER,
    )
    weight_decay: float = setting(0.01, "weight decay of AdamW", OPTIMISER, low=0)
    max_grad_norm: float = setting(
        1.0, "gradients are clipped to this norm; 0 never", OPTIMISER, low=0
    )
    max_length: int = setting(2048, "tokens of prompt and solution together", DATA, above=0)
    completion_only_loss: bool = setting(
        True, "learn working, answer and EOS alone; false: the prompt too, as the authors' code",
        OBJECTIVE,
    )  # fmt: skip
    load_in_4bit: bool = setting(False, "quantise the frozen weights of the linear layers", MODEL)
    precision: Literal["auto", "bfloat16", "float16"] = setting(
        "auto",
        "format of frozen weights and products; auto: float32 on a CPU, the GPU's own on one; the "
        "adapter is float32",
        MODEL,
    )
    template: Literal["project", "model"] = setting(
        "project", "whose chat template makes the prompts", DATA, option=False
    )
    prompt: PromptFormat = setting(
        PROJECT_PROMPT, "what prompts say, and the tags of an answer", DATA, option=False
    )
    save_steps: int = setting(
        100, "optimizer steps between checkpoints", SAVING, above=0, free=True
    )
    report_to: Literal["none", "tensorboard", "trackio", "wandb"] = setting(
        "none", "a tracker beside metrics.jsonl", SAVING, free=True
    )
    lora: LoraSettings = setting(LoraSettings(), "the adapter", MODEL)
    seed: int = setting(3407, "of adapter and data order", OPTIMISER)

    def __post_init__(self) -> None:
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(
                f"max_steps must be >= 1, or -1 to train by epochs; got {self.max_steps}"
            )
        check_settings(self)
        if self.micro_batch_size is not None and (
            self.micro_batch_size < 1 or self.batch_size % self.micro_batch_size
        ):
            raise ValueError(
                f"micro_batch_size must divide batch_size={self.batch_size}; got "
                f"{self.micro_batch_size}"
            )
