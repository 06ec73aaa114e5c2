"""Whether a run fits a GPU, what to change if not, and settings that fit."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sage_unsloth.planning.memory import GIB, MemoryPlan, memory_plan
from sage_unsloth.planning.presets import CARDS, MODELS, ModelPreset, nearest_card
from sage_unsloth.planning.setup import Setup, setup_for


def check_fits(setup: Setup, memory_gib: float) -> MemoryPlan:
    """The memory plan of a run that fits.

    Raises:
        ValueError: it does not fit; the message has each change, its saving, and whether it
            suffices.
    """
    fits = memory_plan(setup, memory_gib)
    if fits.fits:
        return fits
    lines = [
        f"the run must fit the GPU's {memory_gib:.1f} GiB, but it needs {fits.needed / GIB:.1f} "
        "GiB (computed). What to change, least harm first:"
    ]
    together = setup
    for number, (text, changed) in enumerate(memory_savings(setup), 1):
        saved = fits.needed - memory_plan(changed, memory_gib).needed
        together = replace(together, **_difference(setup, changed))
        after = memory_plan(together, memory_gib)
        which = "then" if number == 1 else f"with 1 to {number}"
        verdict = "enough" if after.fits else "not enough"
        lines.append(
            f"  {number}. {text}: saves {saved / GIB:.1f} GiB, {which} {after.needed / GIB:.1f} "
            f"GiB: {verdict}"
        )
    smaller = _smaller_models(setup, memory_gib)
    if smaller:
        lines.append(f"  Or a smaller model: {', '.join(smaller)}.")
    raise ValueError("\n".join(lines))


def _smaller_models(setup: Setup, memory_gib: float) -> list[str]:
    """Presets with fewer parameters that fit, without the embedded model."""
    return [
        name
        for name, model in MODELS.items()
        if model.architecture.num_parameters < setup.architecture.num_parameters
        and model.dtype != "float32"
        and memory_plan(setup_for(model, nearest_card(memory_gib)), memory_gib).fits
    ]


def _difference(before: Setup, after: Setup) -> dict:
    return {key: value for key, value in vars(after).items() if value != vars(before)[key]}


def memory_savings(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Changes that need less memory, least harm first; the first three do not change results."""
    s = setup
    if not s.recompute_logits:
        yield (
            "compute the logits of the loss again in its backward pass "
            "(UNSLOTH_GRPO_LOGPROB_RECOMPUTE=1): same result",
            replace(s, recompute_logits=True),
        )
    if s.micro_batch > 1:
        yield (
            f"micro-batch 1 instead of {s.micro_batch}: same result, slower",
            replace(s, micro_batch=1),
        )
    if s.gradient_checkpointing != "unsloth":
        yield (
            'gradient_checkpointing "unsloth": same result, slower',
            replace(s, gradient_checkpointing="unsloth"),
        )
    if s.use_vllm:
        yield (
            "rollouts by transformers instead of vLLM: same distribution, much slower",
            replace(s, use_vllm=False),
        )
    if s.lora_rank is not None and s.weight_bits != 4:
        more = " (vLLM from 0.28 needs the package vllm-bnb-plugin for it)" if s.use_vllm else ""
        yield "4-bit weights: a slightly worse model" + more, replace(s, weight_bits=4)
    if s.prompts_per_step > 1:
        yield (
            f"1 prompt a step instead of {s.prompts_per_step}: a smaller batch",
            replace(s, prompts_per_step=1),
        )
    if s.lora_rank is None:
        yield (
            "an adapter (LoRA, rank 8) instead of full fine-tuning",
            replace(s, lora_rank=8, weight_bits=16),
        )
    if s.max_completion_length > 256:
        half = s.max_completion_length // 2
        yield (
            f"completions of {half:,} tokens instead of {s.max_completion_length:,}: more are cut "
            "off",
            replace(s, max_completion_length=half),
        )


def fit_to_memory(setup: Setup, memory_gib: float, fixed: Iterable[str] = ()) -> Setup:
    """The settings with the fewest changes to fit: first those that keep results, then 4-bit
    weights.

    Lengths, batch, rollouts, trained weights and the fields in `fixed` never change. If the changes
    do not suffice, the settings are returned unchanged.
    """
    bits = 4 if setup.lora_rank is not None else setup.weight_bits
    changed = setup
    for change in ({}, {"recompute_logits": True}, {"micro_batch": 1}, {"weight_bits": bits}):
        if not set(change) & set(fixed):
            changed = replace(changed, **change)
        if memory_plan(changed, memory_gib).fits:
            return changed
    return setup


def plan_setup(model: ModelPreset, memory_gib: float | None, **changes) -> Setup:
    """The presets' settings for a model on a GPU of this size, made to fit.

    Args:
        changes: fields of `Setup`, not changed to fit; None leaves the preset's.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    if memory_gib is None:
        return setup_for(model, None, **changes)
    setup = setup_for(model, nearest_card(memory_gib), **changes)
    return fit_to_memory(setup, memory_gib, fixed=changes)


def memory_of_card(memory: float | None) -> float | None:
    """Memory to plan for, GiB; None if `memory` is None and there is no GPU.

    Args:
        memory: GiB; a whole number is the nominal size of a GPU: of one in `CARDS` (24, say) it
            becomes the reported one (22.0), of another the smallest such share. None asks this
            machine. ValueError unless > 0.
    """
    if memory is not None:
        if memory <= 0:
            raise ValueError(
                f"the memory of a GPU must be > 0 GiB, got {memory:g}. Leave --memory out to ask "
                "this machine"
            )
        card = CARDS.get(f"{memory:g}")
        if card is not None:
            return card.memory_gib
        share = min(card.memory_gib / float(size) for size, card in CARDS.items())
        return memory * share if memory == int(memory) else memory
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / GIB
