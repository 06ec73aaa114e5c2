"""The settings that determine the memory of a run."""

from dataclasses import dataclass

from sage_unsloth.planning.architecture import Architecture
from sage_unsloth.planning.presets import PAPER_BETA, CardPreset, ModelPreset


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that determine the memory of a run.

    Attributes:
        lora_rank: of the adapter on `lora_targets`; None trains every weight.
        lora_targets: names of the linear layers with an adapter; None is all seven.
        weight_bits: 32, 16 or 4 (embeddings and head stay in 16).
        optimizer_8bit: 8-bit AdamW; else 32-bit.
        beta: KL coefficient; above 0, full fine-tuning keeps a frozen copy of the model as its
            reference. An adapter's reference is the model with the adapter off, for free.
        max_prompt_length, max_completion_length: tokens.
        prompts_per_step, num_generations: problems in a step, completions for each.
        micro_batch: sequences in one forward and backward pass of the loss. All together is
            Unsloth's packed pass; fewer need `UNSLOTH_GRPO_SEQ_PACKING=0` and
            `unsloth_grpo_mini_batch` = completions / micro_batch.
        gradient_checkpointing: "unsloth" keeps each layer's input in host memory, "layers" on the
            GPU, "none" keeps every activation.
        recompute_logits: `UNSLOTH_GRPO_LOGPROB_RECOMPUTE=1`: the loss stores one number a token and
            recomputes the logits in its backward pass, by chunks. If entropies are needed, no
            logits are stored either (`scoring.py`).
        use_vllm: rollouts by vLLM inside Unsloth, in standby during the update; else by
            transformers.
        gpu_memory_utilization: the share of the GPU for vLLM.

    Raises:
        ValueError: quantised weights or vLLM with full fine-tuning, or a value out of range.
    """

    architecture: Architecture
    lora_rank: int | None = 8
    lora_targets: tuple[str, ...] | None = None
    weight_bits: int = 16
    optimizer_8bit: bool = True
    beta: float = PAPER_BETA
    max_prompt_length: int = 1024
    max_completion_length: int = 1024
    prompts_per_step: int = 1
    num_generations: int = 8
    micro_batch: int = 8
    gradient_checkpointing: str = "unsloth"
    recompute_logits: bool = False
    use_vllm: bool = False
    gpu_memory_utilization: float = 0.5

    def __post_init__(self) -> None:
        for name in (
            "max_prompt_length",
            "max_completion_length",
            "prompts_per_step",
            "num_generations",
            "micro_batch",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.weight_bits not in (4, 16, 32):
            raise ValueError(f"weight_bits must be 4, 16 or 32, got {self.weight_bits}")
        if self.gradient_checkpointing not in ("unsloth", "layers", "none"):
            raise ValueError(
                'gradient_checkpointing must be "unsloth", "layers" or "none", got '
                f"{self.gradient_checkpointing!r}"
            )
        if self.lora_rank is None and (self.weight_bits == 4 or self.use_vllm):
            raise ValueError(
                "full fine-tuning needs 16-bit weights and rollouts by transformers, got "
                f"weight_bits={self.weight_bits}, use_vllm={self.use_vllm}. Train an adapter, or "
                "change these"
            )

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def max_length(self) -> int:
        return self.max_prompt_length + self.max_completion_length


def preset_setup(model: ModelPreset, card: CardPreset | None = None, **changes) -> Setup:
    """The settings of the presets; `changes` are fields of `Setup` and win."""
    full = model.full_finetuning if "lora_rank" not in changes else changes["lora_rank"] is None
    small = model.dtype == "float32"  # the embedded model, trained on a CPU
    settings: dict = dict(
        architecture=model.architecture,
        max_prompt_length=model.max_prompt_length,
        max_completion_length=model.max_completion_length,
        prompts_per_step=model.prompts_per_step,
        num_generations=model.num_generations,
        micro_batch=model.prompts_per_step * model.num_generations,
        lora_rank=None if full else 8,
        # Full fine-tuning keeps weights and reference in float32: in bfloat16 alone, small steps
        # are lost in rounding.
        weight_bits=32 if small or full else 16,
        optimizer_8bit=not small,
        gradient_checkpointing="none" if small else "unsloth",
    )
    if card is not None and not small:
        settings |= dict(
            micro_batch=card.micro_batch,
            recompute_logits=card.recompute_logits,
            gradient_checkpointing=card.gradient_checkpointing,
        )
        if card.gpu_memory_utilization is not None:
            settings["gpu_memory_utilization"] = card.gpu_memory_utilization
        if card.load_in_4bit and not full:
            settings["weight_bits"] = 4
    if card is not None and card.use_vllm and not full:
        settings["use_vllm"] = True
    return Setup(**(settings | changes))
