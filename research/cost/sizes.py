"""The size of a loss, and whether one with whole logits fits into memory."""

import os
from dataclasses import dataclass

FLOAT32 = 4
LOGITS_HELD = 4  # tensors of the logits' size that a materialised loss holds at once


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the loss.

    Attributes:
        hidden: H.
        vocabulary: V.
        length: T, completion tokens.
        batch: B, completions of one pass.
    """

    hidden: int
    vocabulary: int
    length: int
    batch: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.batch % min(8, self.batch):
            raise ValueError(
                "batch must be a multiple of 8, the completions of a prompt, or less than 8, "
                f"got {self.batch}"
            )

    @property
    def logits_bytes(self) -> int:
        """Of (B, T, V) in float32."""
        return self.batch * self.length * self.vocabulary * FLOAT32

    @property
    def seconds_on_a_cpu(self) -> float:
        """Of one pass, for the estimate: 15 ns a logit and two products at 50 GFLOP/s, one core."""
        return self.logits_bytes / FLOAT32 * (15e-9 + 4 * self.hidden / 50e9)

    def __str__(self) -> str:
        return f"V {self.vocabulary:,}, H {self.hidden:,}, T {self.length:,}, B {self.batch}"


SMALL = Size(hidden=256, vocabulary=151_936, length=128, batch=8)
LARGE = Size(hidden=3584, vocabulary=151_936, length=2048, batch=8)


def default_size() -> Size:
    """A 7B model's shapes on a GPU; elsewhere what takes minutes."""
    import torch

    return LARGE if torch.cuda.is_available() else SMALL


def fits(size: Size) -> bool:
    """Whether a loss that materialises the logits fits into the free memory."""
    import torch

    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    elif hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return True
    return LOGITS_HELD * size.logits_bytes < free
