"""The signals that a guide may read: one value for each completion token."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

OPTIONAL_SIGNALS = ("entropies", "ref_entropies", "teacher_logps")
"""Fields of `TokenSignals` that are set only if a guide needs them."""


@contextmanager
def read_only(tensors: Mapping[str, Tensor | None], reader: object) -> Iterator[None]:
    """Within this context, writing into the tensors, which belong to the loss, is an error.

    PyTorch counts the writes into a tensor and its views, so the check is free. Writes through
    `.data` or `.numpy()`, and into tensors of `torch.inference_mode`, are not counted.

    Raises:
        ValueError: with the names of the tensors.
    """
    counted = {name: t for name, t in tensors.items() if t is not None and not t.is_inference()}
    before = {name: (t, t._version) for name, t in counted.items()}
    yield
    written = [name for name, (tensor, count) in before.items() if tensor._version != count]
    if written:
        raise ValueError(
            "a guide, or shape_advantages, must not write into the loss's own tensors, but "
            f"{reader!r:.100} wrote into {', '.join(written)}. Work on a copy, such as "
            f"{written[0]}.clone()"
        )


@dataclass(frozen=True)
class TokenSignals:
    """What a guide may read, one value for each completion token.

    Attributes:
        policy_logps: log π(y_t | s_t) of the policy being trained, nats, (B, T).
        ref_logps: log π_ref(y_t | s_t), nats, (B, T); None only if there are metrics and no guide.
        mask: nonzero at tokens of the completion, (B, T). Values elsewhere may be inf or nan.
        entropies: H_t = −Σ_v π(v | s_t) log π(v | s_t) over the whole vocabulary at the sampling
            temperature, nats, (B, T); None unless the guide or `log_entropy` needs them.
        ref_entropies: the same of π_ref, nats, (B, T); None unless the guide needs them.
        teacher_logps: log π_teacher(y_t | s_t), nats, (B, T); None unless the guide needs them.

    Raises:
        ValueError: a tensor is not (B, T), or the shapes differ.
    """

    policy_logps: Tensor
    ref_logps: Tensor | None
    mask: Tensor
    entropies: Tensor | None = None
    ref_entropies: Tensor | None = None
    teacher_logps: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = {name: tuple(v.shape) for name, v in vars(self).items() if v is not None}
        if len(set(shapes.values())) != 1 or self.mask.dim() != 2:
            raise ValueError(
                f"every signal must be a (B, T) tensor of the same shape, got {shapes}"
            )

    def require(self, name: str, guide: object) -> Tensor:
        """The signal `name`; ValueError, naming the guide that needs it, if it is None."""
        value = getattr(self, name)
        if value is None:
            reader = guide if isinstance(guide, str) else type(guide).__name__
            raise ValueError(
                f"{reader} needs the signal {name!r}, got {name}=None. Pass TokenSignals(..., "
                f"{name}=…), or use guided_kl, which fills in what the guide's `needs` names"
            )
        return value
