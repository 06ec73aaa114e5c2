"""The settings of stage 1 (Table 7)."""

from dataclasses import dataclass

from sage_unsloth.runs.settings import (
    DATA,
    OBJECTIVE,
    OPTIMISER,
    SAVING,
    check_settings,
    document_settings,
    setting,
)
from sage_unsloth.training.stage_config import StageConfig


@document_settings
@dataclass(frozen=True, kw_only=True)
class SftConfig(StageConfig):
    """Stage 1 (Table 7); the values are the paper's where it gives one."""

    max_steps: int = setting(-1, "optimizer steps; -1: by epochs", OPTIMISER, trainer=True)
    epochs: int = setting(2, "passes over the rows", OPTIMISER, above=0)
    batch_size: int = setting(1, "rows in an optimizer step", OPTIMISER, above=0)
    micro_batch_size: int | None = setting(
        None, "rows in one pass through the model; none: all of a step", OPTIMISER
    )
    learning_rate: float = setting(2e-4, "peak learning rate", OPTIMISER, above=0, trainer=True)
    warmup_steps: int = setting(5, "warm-up steps", OPTIMISER, low=0, trainer=True)
    max_length: int = setting(
        2048, "tokens of prompt and solution together", DATA, above=0, trainer=True
    )
    completion_only_loss: bool = setting(
        True, "learn only reasoning, answer and EOS; false: the prompt too, as the authors' code",
        OBJECTIVE, trainer=True,
    )  # fmt: skip
    save_steps: int = setting(
        100, "optimizer steps between checkpoints", SAVING, above=0, free=True
    )
    seed: int = setting(3407, "seed of adapter and data order", OPTIMISER, trainer=True)

    def __post_init__(self) -> None:
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(
                f"max_steps must be >= 1, or -1 to train by epochs, got {self.max_steps}"
            )
        check_settings(self)
        if self.micro_batch_size is not None and (
            self.micro_batch_size < 1 or self.batch_size % self.micro_batch_size
        ):
            raise ValueError(
                f"micro_batch_size must divide batch_size={self.batch_size}, got "
                f"{self.micro_batch_size}"
            )
