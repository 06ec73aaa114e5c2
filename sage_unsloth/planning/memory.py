"""The memory that an RL run needs, computed before anything is loaded and without PyTorch.

Parameter counts, state and cache are exact up to allocation granularity; what depends on kernels
(activations, logits, reserve) is an estimate, marked as such, with its constant explained. Not
measured on a GPU.

The peak is the permanent part (weights, trained state, reserve) plus the larger of two phases that
never overlap: the update (activations, logits) and the rollouts (KV cache), because Unsloth's
standby mode frees vLLM's cache for the update and transformers drops its own.
"""

from dataclasses import dataclass
from math import ceil

from sage_unsloth.planning.architecture import Architecture
from sage_unsloth.planning.setup import Setup

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
# assumes 0.15 to 1 GiB of graphs.
VLLM_BYTES = GIB


@dataclass(frozen=True)
class Item:
    """One line of the plan; see `MemoryPlan`."""

    name: str
    bytes: float
    phase: str
    estimate: bool
    note: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs on the GPU.

    Attributes:
        items: bytes, the phase that holds them ("always", "update" or "rollouts"), whether they are
            an estimate, and a note.
        peak: bytes at the maximum.
        needed: minimal memory of a GPU: the peak, or what vLLM needs to start in its share, if that
            is more.
        available: bytes of the GPU; None if unknown.
        rollouts_at_once: completions whose KV cache fits together; vLLM queues the others.
        host: bytes of host memory for gradient checkpointing (an estimate).
    """

    items: tuple[Item, ...]
    peak: float
    needed: float
    available: float | None
    rollouts_at_once: int
    host: float

    @property
    def fits(self) -> bool | None:
        """Whether it fits the GPU; None if unknown."""
        return None if self.available is None else self.needed <= self.available


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
        raise ValueError(f"lora_targets must be among {', '.join(shapes)}, got {unknown[0]!r}")
    return architecture.num_layers * rank * sum(sum(shapes[name]) for name in targets or shapes)


def kv_bytes_per_token(architecture: Architecture, bytes_per_number: int = 2) -> int:
    """Bytes of the key and value cache for one token: 2 · layers · KV heads · head size numbers."""
    a = architecture
    return 2 * a.num_layers * a.num_kv_heads * a.head_dim * bytes_per_number


def memory_plan(setup: Setup, memory_gib: float | None = None) -> MemoryPlan:
    """Every line of what a run needs, and their sum.

    Args:
        memory_gib: the GPU's memory as PyTorch reports it, GiB; None plans without a verdict.
    """
    a, s = setup.architecture, setup
    number = 4 if s.weight_bits == 32 else 2  # bytes of an activation or an unquantised weight
    available = None if memory_gib is None else memory_gib * GIB
    weights = _weights(s, number)
    items = [weights, *_trained_state(s, number), _activations(s, number), _logits(s, number)]
    if s.use_vllm:
        items.append(Item("vLLM", VLLM_BYTES, "always", True, "CUDA graphs and buffers"))
    per_sequence = s.max_length * kv_bytes_per_token(a, number)
    at_once = s.completions_per_step
    if s.use_vllm and available is not None:
        room = available * s.gpu_memory_utilization - weights.bytes - VLLM_BYTES
        at_once = max(1, min(at_once, int(room // per_sequence)))
    items.append(_kv_cache(s, at_once, number))

    phases = ("always", "update", "rollouts")
    always, update, rollouts = (sum(i.bytes for i in items if i.phase == phase) for phase in phases)
    rest = always + max(update, rollouts)
    reserve = CUDA_CONTEXT_BYTES + FRAGMENTATION * rest
    note = f"CUDA context, and {100 * FRAGMENTATION:g} % of the rest for fragmentation"
    items.append(Item("reserve", reserve, "always", True, note))
    peak = needed = rest + reserve
    if s.use_vllm:
        # vLLM does not start unless its share holds the weights and one completion.
        least = (weights.bytes + VLLM_BYTES + per_sequence) / s.gpu_memory_utilization
        needed = max(peak, least)
    host = 0.0
    if s.gradient_checkpointing == "unsloth":
        host = s.completions_per_step * s.max_length * a.hidden_size * number * a.num_layers
    return MemoryPlan(tuple(items), peak, needed, available, at_once, host)


def _weights(s: Setup, number: int) -> Item:
    a = s.architecture
    quantised = a.linear_parameters if s.weight_bits == 4 else 0
    total = (a.num_parameters - quantised) * number + quantised * BYTES_PER_4BIT_WEIGHT
    rest = ", embeddings and head in 16" if quantised else ""
    note = f"{a.num_parameters / 1e6:,.1f} million in {s.weight_bits} bits{rest}"
    return Item("weights", total, "always", False, note)


def _kv_cache(s: Setup, at_once: int, number: int) -> Item:
    per_token = kv_bytes_per_token(s.architecture, number)
    note = (
        f"{at_once} completions of {s.max_length:,} tokens, {per_token / 1024:.0f} KiB each token"
    )
    return Item("KV cache", at_once * (s.max_length * per_token), "rollouts", False, note)


def trained_parameters(setup: Setup) -> int:
    if setup.lora_rank is None:
        return setup.architecture.num_parameters
    return lora_parameters(setup.architecture, setup.lora_rank, setup.lora_targets)


def optimizer_bytes(setup: Setup) -> float:
    """AdamW's two states; with an 8-bit optimizer those of embeddings stay in 32 bits."""
    trained = trained_parameters(setup)
    if not setup.optimizer_8bit:
        return trained * BYTES_PER_32BIT_STATE
    a = setup.architecture
    wide = a.vocab_size * a.hidden_size if setup.lora_rank is None else 0
    return wide * BYTES_PER_32BIT_STATE + (trained - wide) * BYTES_PER_8BIT_STATE


def _trained_state(s: Setup, number: int) -> list[Item]:
    """Adapter (float32), gradients, optimizer states, and the reference of full fine-tuning.

    Gradients have the trained weights' dtype.
    """
    trained = trained_parameters(s)
    items = []
    if s.lora_rank is not None:
        number = 4
        note = f"{trained / 1e6:.1f} million, float32"
        items.append(Item("adapter", trained * number, "always", False, note))
    note = f"{number} bytes a trained weight"
    items.append(Item("gradients", trained * number, "always", False, note))
    note = "AdamW, 8 bits" if s.optimizer_8bit else "AdamW, 32 bits"
    if s.optimizer_8bit and s.lora_rank is None:
        note += " (embedding 32)"
    items.append(Item("optimizer", optimizer_bytes(s), "always", False, note))
    if s.lora_rank is None and s.beta > 0:
        copy = s.architecture.num_parameters * number
        items.append(Item("reference", copy, "always", False, "a frozen copy, since β > 0"))
    return items


def layer_numbers_per_token(architecture: Architecture) -> int:
    """Numbers that one layer's backward pass holds for each token (an estimate).

    Stored in the forward pass, in transformers' Qwen2 with every weight trained: 8 hidden (of each
    norm the input in float32, its normalised value and its output), 2 of all heads (queries,
    attention's output), 2 of the KV heads, 4 intermediate (gate, its activation, up, their
    product). In the backward pass also gradients of 2 hidden and 2 intermediate. An adapter run
    stores 2 hidden less, Unsloth's fused kernels less again.
    """
    a = architecture
    heads = 2 * (a.num_heads + a.num_kv_heads) * a.head_dim
    return 10 * a.hidden_size + heads + 6 * a.intermediate_size


def _activations(s: Setup, number: int) -> Item:
    a = s.architecture
    tokens = min(s.micro_batch, s.completions_per_step) * s.max_length
    # Every pass of a step is in one graph, until the one backward pass.
    all_tokens = s.completions_per_step * s.max_length
    layer = layer_numbers_per_token(a)
    # Outside the layers: embeddings, last hidden states, and their gradients.
    outside = 4 * a.hidden_size
    if s.gradient_checkpointing == "none":
        gradients = 2 * (a.hidden_size + a.intermediate_size)  # of one layer at a time
        numbers = all_tokens * a.num_layers * (layer - gradients) + tokens * (gradients + outside)
    elif s.gradient_checkpointing == "layers":
        numbers = all_tokens * a.num_layers * a.hidden_size + tokens * (layer + outside)
    else:
        # Two layers' inputs on their way back.
        numbers = tokens * (2 * a.hidden_size + layer + outside)
    return Item(
        "activations",
        numbers * number,
        "update",
        True,
        f"{tokens:,} tokens at once, checkpointing: {s.gradient_checkpointing}",
    )


def _logits(s: Setup, number: int) -> Item:
    """The loss's logits in Unsloth 2026.10: never (B, T, V) at once, though all may be stored.

    A chunk is T / max(4, length // 4096) tokens; its logits, their float32 copy and both gradients
    are held. Without recomputation float32 logits stay until the backward pass: of every completion
    with one pass, or with completions of at most 1,024 tokens in at most 8 passes; of one pass
    otherwise (that one recomputes, pass by pass).
    """
    vocabulary, tokens = s.architecture.vocab_size, s.max_completion_length
    chunk = ceil(tokens / max(4, s.max_length // 4096))
    working = chunk * vocabulary * 2 * (number + 4)
    selected, passes = 0, ceil(s.completions_per_step / s.micro_batch)
    if not s.recompute_logits:
        every = passes == 1 or (tokens <= 1024 and passes <= 8)
        selected = s.completions_per_step if every else s.micro_batch
    note = f"chunks of {chunk:,} tokens x {vocabulary:,}" + (
        f", {selected} completions kept" if selected else ", recomputed"
    )
    return Item("logits", working + selected * tokens * vocabulary * 4, "update", True, note)
