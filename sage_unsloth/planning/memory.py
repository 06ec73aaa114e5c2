"""How much memory a run of the second stage needs, by arithmetic: before anything is loaded,
without PyTorch.

Parameter counts, state and cache are exact up to allocation granularity; what depends on kernels
(activations, logits, reserve) is an estimate, marked as one, with its constant explained where it
stands. Computed, not measured on a GPU.

The peak is what stays (weights, trained state, reserve) plus the larger of two phases that never
overlap: the update (activations, logits) and the rollouts (KV cache), because Unsloth's standby
mode frees vLLM's cache for the update and transformers drops its own.
"""

from dataclasses import dataclass
from math import ceil

from sage_unsloth.planning.presets import PAPER_BETA, Architecture, CardPreset, ModelPreset

GIB = 2**30

# NF4 with a second quantisation: 4 bits, 8 bits for each 64 weights, and 4 bytes for each 256 of
# those.
BYTES_PER_4BIT_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
# 8-bit AdamW: two states of one byte, and two scales of 4 bytes for each 256 of them; in 32 bits
# two of 4 bytes.
BYTES_PER_8BIT_STATE = 2 + 2 * 4 / 256
BYTES_PER_32BIT_STATE = 8
# Estimate: the CUDA context, cuBLAS workspaces and Triton's kernels; and what the allocator cannot
# use between blocks.
CUDA_CONTEXT_BYTES = GIB
FRAGMENTATION = 0.05
# Estimate: CUDA graphs and sampling buffers of vLLM, which stay through standby; Unsloth itself
# reckons 0.15 to 1 GiB of graphs.
VLLM_BYTES = GIB


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that memory depends on.

    Attributes:
        architecture: shape of the model.
        lora_rank: of the adapter on `lora_targets`; None trains every weight.
        lora_targets: names of the linear layers that get one; None all seven.
        weight_bits: 32, 16 or 4 (the embeddings and the head stay in 16).
        optimizer_8bit: 8-bit AdamW; else 32-bit.
        beta: KL coefficient; above 0, full fine-tuning keeps a frozen copy of the model as its
            reference. An adapter's reference is the model with the adapter off, at no cost.
        max_prompt_length, max_completion_length: tokens.
        prompts_per_step, num_generations: problems in a step, completions for each.
        micro_batch: sequences in one forward and backward pass of the loss. All of them together is
            Unsloth's packed pass; fewer take `UNSLOTH_GRPO_SEQ_PACKING=0` and
            `unsloth_grpo_mini_batch` = completions / micro_batch.
        gradient_checkpointing: "unsloth" keeps each layer's input in the computer's memory,
            "layers" on the card, "none" keeps every activation.
        recompute_logits: `UNSLOTH_GRPO_LOGPROB_RECOMPUTE=1`: the loss keeps one number a token and
            computes the logits again in its backward pass, a chunk at a time. Where entropies are
            asked for, no logits are kept either (`scoring.py`).
        use_vllm: rollouts by vLLM inside Unsloth, in standby during the update; else by
            transformers.
        gpu_memory_utilization: the share of the card that vLLM may use.

    Raises:
        ValueError: quantised weights or vLLM beside full fine-tuning, or a value out of its range.
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
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in (
            "max_prompt_length",
            "max_completion_length",
            "prompts_per_step",
            "num_generations",
            "micro_batch",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.weight_bits not in (4, 16, 32):
            raise ValueError(f"weight_bits must be 4, 16 or 32; got {self.weight_bits}")
        if self.gradient_checkpointing not in ("unsloth", "layers", "none"):
            raise ValueError(
                f'gradient_checkpointing must be "unsloth", "layers" or "none"; got '
                f"{self.gradient_checkpointing!r}"
            )
        if self.lora_rank is None and (self.weight_bits == 4 or self.use_vllm):
            raise ValueError(
                "full fine-tuning needs 16-bit weights and rollouts by transformers, because "
                "quantised weights cannot be trained and Unsloth refuses vLLM beside it; got "
                f"weight_bits={self.weight_bits}, use_vllm={self.use_vllm}; train an adapter, or "
                "change these"
            )

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def max_length(self) -> int:
        return self.max_prompt_length + self.max_completion_length


@dataclass(frozen=True)
class Item:
    """One line of the plan: bytes, the phase in which they are held, whether they are an estimate,
    and why they are needed.
    """

    name: str
    bytes: float
    phase: str
    estimate: bool
    note: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs on the card.

    Attributes:
        items: the lines; `phase` is "always", "update" or "rollouts".
        peak: bytes at the fullest moment.
        needed: the least memory of a card for it: the peak, or what lets vLLM start in its share of
            the card, if that is more.
        available: bytes of the card; None where it is not known.
        rollouts_at_once: completions whose KV cache fits together; vLLM lets the others wait.
        host: bytes of the computer's memory that gradient checkpointing fills (an estimate).
    """

    items: tuple[Item, ...]
    peak: float
    needed: float
    available: float | None
    rollouts_at_once: int
    host: float

    @property
    def fits(self) -> bool | None:
        """Whether it fits the card; None where the card is not known."""
        return None if self.available is None else self.needed <= self.available


def setup_for(model: ModelPreset, card: CardPreset | None = None, **changes) -> Setup:
    """The settings that the presets name; `changes` are fields of `Setup` and win."""
    full = model.full_finetuning if "lora_rank" not in changes else changes["lora_rank"] is None
    small = model.dtype == "float32"  # the embedded model, trained on a CPU
    settings: dict = dict(
        architecture=model.architecture,
        max_prompt_length=model.max_prompt_length,
        max_completion_length=model.max_completion_length,
        lora_rank=None if full else 8,
        # Full fine-tuning keeps weights and reference in float32: in bfloat16 alone, small steps
        # are lost in rounding.
        weight_bits=32 if small or full else 16,
        optimizer_8bit=not small,
        recompute_logits=not small,
        gradient_checkpointing="none" if small else "unsloth",
    )
    if card is not None and not small:
        settings |= dict(
            micro_batch=card.micro_batch,
            prompts_per_step=card.prompts_per_step,
            recompute_logits=card.recompute_logits,
            gradient_checkpointing=card.gradient_checkpointing,
        )
        if card.use_vllm and not full:
            settings |= dict(use_vllm=True, gpu_memory_utilization=card.gpu_memory_utilization)
        if card.load_in_4bit and not full:
            settings["weight_bits"] = 4
    return Setup(**(settings | changes))


def lora_parameters(
    architecture: Architecture, rank: int, targets: tuple[str, ...] | None = None
) -> int:
    """Weights of an adapter: r · (inputs + outputs) for each target of each layer.

    Raises:
        ValueError: a target that the model does not have.
    """
    shapes = architecture.linear_shapes
    unknown = sorted(set(targets or ()) - set(shapes))
    if unknown:
        raise ValueError(f"lora_targets must be among {', '.join(shapes)}; got {unknown[0]!r}")
    return architecture.num_layers * rank * sum(sum(shapes[name]) for name in targets or shapes)


def kv_bytes_per_token(architecture: Architecture, bytes_per_number: int = 2) -> int:
    """Bytes of the key and value cache for one token: 2 · layers · KV heads · head size numbers."""
    a = architecture
    return 2 * a.num_layers * a.num_kv_heads * a.head_dim * bytes_per_number


def memory_plan(setup: Setup, memory_gib: float | None = None) -> MemoryPlan:
    """Every line of what a run needs, and their sum.

    Args:
        memory_gib: the card's memory as PyTorch reports it, GiB; None makes a plan without a
            verdict.
    """
    a, s = setup.architecture, setup
    number = 4 if s.weight_bits == 32 else 2  # bytes of an activation or an unquantised weight
    quantised = a.linear_parameters if s.weight_bits == 4 else 0
    weights = (a.num_parameters - quantised) * number + quantised * BYTES_PER_4BIT_WEIGHT
    items = [
        Item(
            "weights",
            weights,
            "always",
            False,
            f"{a.num_parameters / 1e6:,.1f} million in {s.weight_bits} bits"
            + (", embeddings and head in 16" if quantised else ""),
        )
    ]
    items += [*_trained_state(s, number), _activations(s, number), _logits(s, number)]

    per_sequence = s.max_length * kv_bytes_per_token(a, number)
    at_once, available = s.completions_per_step, None if memory_gib is None else memory_gib * GIB
    if s.use_vllm:
        items.append(Item("vLLM", VLLM_BYTES, "always", True, "CUDA graphs and buffers"))
        if available is not None:
            room = available * s.gpu_memory_utilization - weights - VLLM_BYTES
            at_once = max(1, min(at_once, int(room // per_sequence)))
    items.append(
        Item(
            "KV cache",
            at_once * per_sequence,
            "rollouts",
            False,
            f"{at_once} completions of {s.max_length:,} tokens, "
            f"{kv_bytes_per_token(a, number) / 1024:.0f} KiB each token",
        )
    )

    phases = ("always", "update", "rollouts")
    always, update, rollouts = (sum(i.bytes for i in items if i.phase == phase) for phase in phases)
    rest = always + max(update, rollouts)
    reserve = CUDA_CONTEXT_BYTES + FRAGMENTATION * rest
    items.append(
        Item(
            "reserve",
            reserve,
            "always",
            True,
            "CUDA context, and 5 % of the rest for fragmentation",
        )
    )
    peak = needed = rest + reserve
    if s.use_vllm:
        # vLLM does not start unless its share holds the weights and one completion.
        needed = max(peak, (weights + VLLM_BYTES + per_sequence) / s.gpu_memory_utilization)
    host = 0.0
    if s.gradient_checkpointing == "unsloth":
        host = s.completions_per_step * s.max_length * a.hidden_size * number * a.num_layers
    return MemoryPlan(tuple(items), peak, needed, available, at_once, host)


def trained_parameters(setup: Setup) -> int:
    """Weights that the optimizer changes."""
    if setup.lora_rank is None:
        return setup.architecture.num_parameters
    return lora_parameters(setup.architecture, setup.lora_rank, setup.lora_targets)


def optimizer_bytes(setup: Setup) -> float:
    """AdamW's two states; transformers keeps those of embeddings in 32 bits beside an 8-bit
    optimizer.
    """
    trained = trained_parameters(setup)
    if not setup.optimizer_8bit:
        return trained * BYTES_PER_32BIT_STATE
    a = setup.architecture
    wide = a.vocab_size * a.hidden_size if setup.lora_rank is None else 0
    return wide * BYTES_PER_32BIT_STATE + (trained - wide) * BYTES_PER_8BIT_STATE


def _trained_state(s: Setup, number: int) -> list[Item]:
    """Adapter (float32), gradients in the dtype of what is trained, optimizer states, and the
    reference of full fine-tuning.
    """
    trained = trained_parameters(s)
    items = []
    if s.lora_rank is not None:
        number = 4
        items.append(
            Item(
                "adapter",
                trained * number,
                "always",
                False,
                f"{trained / 1e6:.1f} million, float32",
            )
        )
    items.append(
        Item("gradients", trained * number, "always", False, f"{number} bytes a trained weight")
    )
    items.append(
        Item(
            "optimizer",
            optimizer_bytes(s),
            "always",
            False,
            "AdamW, 8 bits" + (" (embedding 32)" if s.lora_rank is None else "")
            if s.optimizer_8bit
            else "AdamW, 32 bits",
        )
    )
    if s.lora_rank is None and s.beta > 0:
        items.append(
            Item(
                "reference",
                s.architecture.num_parameters * number,
                "always",
                False,
                "a frozen copy, since β > 0",
            )
        )
    return items


def layer_numbers_per_token(architecture: Architecture) -> int:
    """Numbers that one layer's backward pass holds for each token (an estimate; see the test for
    what transformers keeps).

    Kept from the forward pass, in transformers' Qwen2 with every weight trained: 8 hidden (of each
    norm the input in float32, its normalised value and its output), 2 of all heads (queries,
    attention's output), 2 of the KV heads, 4 intermediate (gate, its activation, up, their
    product). In the backward pass beside them: gradients of 2 hidden and 2 intermediate. An adapter
    run keeps 2 hidden less, Unsloth's fused kernels less again.
    """
    a = architecture
    heads = 2 * (a.num_heads + a.num_kv_heads) * a.head_dim
    return 10 * a.hidden_size + heads + 6 * a.intermediate_size


def _activations(s: Setup, number: int) -> Item:
    a = s.architecture
    tokens = min(s.micro_batch, s.completions_per_step) * s.max_length
    layer = layer_numbers_per_token(a)
    # Outside the layers: embeddings, last hidden states, and their gradients.
    outside = 4 * a.hidden_size
    if s.gradient_checkpointing == "none":
        numbers = a.num_layers * layer + outside
    elif s.gradient_checkpointing == "layers":
        numbers = a.num_layers * a.hidden_size + layer + outside
    else:
        numbers = 2 * a.hidden_size + layer + outside  # two layers' inputs on their way back
    return Item(
        "activations",
        tokens * numbers * number,
        "update",
        True,
        f"{tokens:,} tokens at once, checkpointing: {s.gradient_checkpointing}",
    )


def _logits(s: Setup, number: int) -> Item:
    """The loss's logits, as Unsloth 2026.10 makes them: never (B, T, V) at once, but it may keep
    what it made.

    A chunk is T / max(4, length // 4096) tokens; its logits, their float32 copy and both gradients
    are held. Without recomputation float32 logits stay until the backward pass: of every completion
    if there is one pass, or if completions have at most 1,024 tokens in at most 8 passes; of one
    pass otherwise (that one recomputes, pass by pass).
    """
    vocabulary, tokens = s.architecture.vocab_size, s.max_completion_length
    chunk = ceil(tokens / max(4, s.max_length // 4096))
    working = chunk * vocabulary * 2 * (number + 4)
    kept, passes = 0, ceil(s.completions_per_step / s.micro_batch)
    if not s.recompute_logits:
        every = passes == 1 or (tokens <= 1024 and passes <= 8)
        kept = s.completions_per_step if every else s.micro_batch
    note = f"chunks of {chunk:,} tokens x {vocabulary:,}" + (
        f", {kept} completions kept" if kept else ", recomputed"
    )
    return Item("logits", working + kept * tokens * vocabulary * 4, "update", True, note)
