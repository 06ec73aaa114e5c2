"""The plan of an RL run before anything is loaded: does it fit, how many tokens and steps, how
long, and what to change if not.

`python -m sage_unsloth plan --model qwen2.5-math-7b --memory 24`. The arithmetic is in memory.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sage_unsloth.planning.memory import (
    GIB,
    MemoryPlan,
    Setup,
    memory_plan,
    optimizer_bytes,
    setup_for,
    trained_parameters,
)
from sage_unsloth.planning.presets import CARDS, MODELS, ModelPreset, nearest_card
from sage_unsloth.runs.checkpoints import KEPT


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Sizes of a run.

    Attributes:
        prompts_per_step, completions_per_step: in an optimizer step.
        tokens_per_step: at most, prompts and completions.
        steps: optimizer steps.
        epochs: passes over the rows; None where their number is not known.
        disk_bytes: of the checkpoints that are kept, one being written, and the result.
    """

    prompts_per_step: int
    completions_per_step: int
    tokens_per_step: int
    steps: int
    epochs: float | None
    disk_bytes: float


def step_plan(setup: Setup, steps: int, num_rows: int | None = None) -> StepPlan:
    """Prompts, completions and tokens a step, passes over the rows, and the disk that checkpoints
    take.

    Raises:
        ValueError: no steps, or no rows.
    """
    if steps < 1 or (num_rows is not None and num_rows < 1):
        raise ValueError(
            f"a run needs at least one step and one row; got {steps} steps, {num_rows} rows"
        )
    trained = trained_parameters(setup) * (4 if setup.lora_rank or setup.weight_bits == 32 else 2)
    return StepPlan(
        prompts_per_step=setup.prompts_per_step,
        completions_per_step=setup.completions_per_step,
        tokens_per_step=setup.completions_per_step * setup.max_length,
        steps=steps,
        epochs=None if num_rows is None else steps * setup.prompts_per_step / num_rows,
        disk_bytes=(KEPT + 1) * (trained + optimizer_bytes(setup)) + trained,
    )


def estimate_time(first_step_seconds: float, steps: int) -> float:
    """Seconds of the whole run if every step takes as long as the first: an upper figure, since the
    first one compiles.

    Raises:
        ValueError: a time or a number that is not positive.
    """
    if first_step_seconds <= 0 or steps < 1:
        raise ValueError(
            f"a step takes more than 0 s and a run has at least one; got {first_step_seconds} s, "
            f"{steps} steps"
        )
    return first_step_seconds * steps


def duration(seconds: float) -> str:
    """Seconds for people: "45 s", "12 min", "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Bytes for people: "4.2 MiB", "14.19 GiB"."""
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"


def remedies(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """What can be changed to need less memory, least harm first; the first three change no
    result.
    """
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
            f"completions of {half:,} tokens instead of {s.max_completion_length:,}: more are "
            f"cut off",
            replace(s, max_completion_length=half),
        )


def check_fits(setup: Setup, memory_gib: float) -> MemoryPlan:
    """The memory plan of a run that fits.

    Raises:
        ValueError: it does not fit; the message names each change, what it saves, and whether it
            suffices.
    """
    found = memory_plan(setup, memory_gib)
    if found.fits:
        return found
    lines = [
        f"the run must fit the card's {memory_gib:.1f} GiB; it needs {found.needed / GIB:.1f} "
        f"GiB (computed). What to change, "
        "least harm first:"
    ]
    together = setup
    for number, (text, changed) in enumerate(remedies(setup), 1):
        saved = found.needed - memory_plan(changed, memory_gib).needed
        together = replace(together, **_difference(setup, changed))
        plan = memory_plan(together, memory_gib)
        verdict = "enough" if plan.fits else "not enough"
        lines.append(
            f"  {number}. {text}; saves {saved / GIB:.1f} GiB; "
            f"{'then' if number == 1 else f'with 1 to {number}'} {plan.needed / GIB:.1f} GiB: "
            f"{verdict}"
        )
    smaller = [
        name
        for name, model in MODELS.items()
        if model.architecture.num_parameters < setup.architecture.num_parameters
        and model.dtype != "float32"
        and memory_plan(setup_for(model, nearest_card(memory_gib)), memory_gib).fits
    ]
    if smaller:
        lines.append(f"  Or a smaller model: {', '.join(smaller)}.")
    raise ValueError("\n".join(lines))


def _difference(before: Setup, after: Setup) -> dict:
    return {key: value for key, value in vars(after).items() if value != vars(before)[key]}


def settled(setup: Setup, memory_gib: float, fixed: Iterable[str] = ()) -> Setup:
    """The settings, or as few changes as make them fit: first those that change no result, then
    4-bit weights.

    Lengths, batch, rollouts and what is trained stay, and the fields in `fixed`; if the changes do
    not suffice, the settings come back as they were.
    """
    bits = 4 if setup.lora_rank is not None else setup.weight_bits
    changed = setup
    for change in ({}, {"recompute_logits": True}, {"micro_batch": 1}, {"weight_bits": bits}):
        if not set(change) & set(fixed):
            changed = replace(changed, **change)
        if memory_plan(changed, memory_gib).fits:
            return changed
    return setup


def what_fits() -> list[dict[str, str]]:
    """One row a model, one cell a card: GiB needed of GiB there, and the settings; "no" with the
    GiB where it does not fit.
    """
    rows = []
    for model in MODELS.values():
        if model.dtype == "float32":
            continue
        row = {"model": model.name}
        for card in CARDS.values():
            setup = settled(setup_for(model, card), card.memory_gib)
            plan = memory_plan(setup, card.memory_gib)
            cell = f"{plan.needed / GIB:.1f}: {_settings(setup)}"
            if not plan.fits:
                cell = f"no ({plan.needed / GIB:.1f})"
            row[f"{card.name} GB ({card.memory_gib} GiB)"] = cell
        rows.append(row)
    return rows


def _settings(setup: Setup) -> str:
    bits = "full" if setup.lora_rank is None else f"{setup.weight_bits}-bit"
    rollouts = "vLLM" if setup.use_vllm else "transformers"
    return f"{bits}, {rollouts}, micro-batch {min(setup.micro_batch, setup.completions_per_step)}"


def report(
    setup: Setup,
    title: str,
    memory_gib: float | None,
    steps: int,
    num_rows: int | None = None,
    first_step_seconds: float | None = None,
) -> str:
    """The plan as text: memory line by line, then the sizes of the run. It does not refuse;
    `check_fits` does.
    """
    memory = memory_report(setup, title, memory_gib)
    return f"{memory}\n\n{run_report(setup, steps, num_rows, first_step_seconds)}"


def memory_report(setup: Setup, title: str, memory_gib: float | None) -> str:
    """What the run needs of the card, line by line."""
    plan = memory_plan(setup, memory_gib)
    lines = [f"{title}: computed, not measured on a GPU", ""]
    for item in plan.items:
        phase = "" if item.phase == "always" else f" [{item.phase} only]"
        about = "~" if item.estimate else " "
        lines.append(f"  {about}{size(item.bytes):>10}  {item.name:<12} {item.note}{phase}")
    lines.append(f"  ~{size(plan.peak):>10}  at the peak")
    if plan.needed > plan.peak:
        lines.append(
            f"  ~{size(plan.needed):>10}  of a card, so that vLLM starts in "
            f"{setup.gpu_memory_utilization:.0%} of it"
        )
    if memory_gib is not None:
        lines.append(
            f"   {memory_gib:6.2f} GiB  on the card: it {'fits' if plan.fits else 'does not fit'}"
        )
    if plan.host:
        lines.append(
            f"  ~{size(plan.host):>10}  of the computer's own memory, for inputs of recomputed "
            f"layers"
        )
    if plan.rollouts_at_once < setup.completions_per_step:
        lines.append(f"  vLLM runs {plan.rollouts_at_once} completions at a time, the others wait")
    if setup.use_vllm and setup.weight_bits == 4:
        lines.append("  vLLM from 0.28 needs the package vllm-bnb-plugin for 4-bit weights")
    return "\n".join(lines)


def run_report(
    setup: Setup, steps: int, num_rows: int | None = None, first_step_seconds: float | None = None
) -> str:
    """The sizes of the run: completions and tokens a step, passes over the rows, disk, and time
    once it is known.
    """
    sizes = step_plan(setup, steps, num_rows)
    epochs = "" if sizes.epochs is None else f" ({sizes.epochs:.2f} passes over {num_rows:,} rows)"
    lines = [
        "run",
        f"  {sizes.prompts_per_step} prompts x {setup.num_generations} = "
        f"{sizes.completions_per_step} completions a step, "
        f"at most {sizes.tokens_per_step:,} tokens; {_settings(setup)}",
        f"  {sizes.steps:,} steps{epochs}",
        f"  {size(sizes.disk_bytes)} on disk: {KEPT} checkpoints, one being written, and the result",
    ]
    if first_step_seconds is None:
        lines.append("  time: not known before the first step")
    else:
        lines.append(
            f"  time: {duration(estimate_time(first_step_seconds, steps))} at "
            f"{first_step_seconds:g} s a step"
        )
    return "\n".join(lines)


def memory_of_card(memory: float | None) -> float | None:
    """GiB to plan for: the size on a box (16, 24, 40, 48, 80) becomes what such a card reports;
    None asks this machine.

    None comes back where this machine has no card, and then a plan has no verdict.
    """
    if memory is not None:
        card = CARDS.get(f"{memory:g}")
        return memory if card is None else card.memory_gib
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / GIB


def plan_setup(model: ModelPreset, memory_gib: float | None, **changes) -> Setup:
    """Settings for a model on a card of this size that fit, if they can: the presets', `changes` in
    them, then `settled`.

    Args:
        changes: fields of `Setup`; None leaves the preset's. They are kept whatever else changes.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    if memory_gib is None:
        return setup_for(model, None, **changes)
    setup = setup_for(model, nearest_card(memory_gib), **changes)
    return settled(setup, memory_gib, fixed=changes)
