"""The settings of an adapter."""

from dataclasses import dataclass

from sage_unsloth.runs.settings import MODEL, check_settings, document_settings, setting

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@document_settings
@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapter of both training stages (Tables 7 and 8)."""

    rank: int = setting(8, "rank r of the adapter", MODEL, low=1)
    alpha: int = setting(16, "the adapter is scaled by alpha / rank", MODEL, above=0)
    dropout: float = setting(0.0, "dropout probability of the adapter", MODEL, low=0, high=1)
    targets: tuple[str, ...] = setting(LORA_TARGETS, "linear layers that get an adapter", MODEL)

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.targets or self.dropout == 1:
            raise ValueError(
                "targets must not be empty and dropout must be below 1, got "
                f"targets={self.targets} and dropout={self.dropout}"
            )
