"""The plan of an RL run as text: memory, tokens, steps and time.

`python -m sage_unsloth plan --model qwen2.5-math-7b --memory 24`. memory.py has the arithmetic,
fitting.py the changes if it does not fit.
"""

import textwrap
from dataclasses import dataclass

from sage_unsloth.figures import COLUMNS
from sage_unsloth.planning.fitting import fit_to_memory
from sage_unsloth.planning.memory import (
    GIB,
    memory_plan,
    optimizer_bytes,
    trained_parameters,
)
from sage_unsloth.planning.presets import CARDS, MODELS
from sage_unsloth.planning.setup import Setup, setup_for
from sage_unsloth.runs.checkpoints import NUM_CHECKPOINTS

NOTES = 28
"""The column of notes in a memory report."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Sizes of a run.

    Attributes:
        tokens_per_step: at most, prompts and completions.
        epochs: passes over the rows; None if their number is unknown.
        disk_bytes: of the checkpoints, one more being written, and the result.
    """

    prompts_per_step: int
    completions_per_step: int
    tokens_per_step: int
    steps: int
    epochs: float | None
    disk_bytes: float


def step_plan(setup: Setup, steps: int, num_rows: int | None = None) -> StepPlan:
    """The sizes of a run.

    Raises:
        ValueError: no steps, or no rows.
    """
    if steps < 1 or (num_rows is not None and num_rows < 1):
        raise ValueError(
            f"a run needs at least one step and one row, got {steps} steps, {num_rows} rows"
        )
    trained = trained_parameters(setup) * (4 if setup.lora_rank or setup.weight_bits == 32 else 2)
    return StepPlan(
        prompts_per_step=setup.prompts_per_step,
        completions_per_step=setup.completions_per_step,
        tokens_per_step=setup.completions_per_step * setup.max_length,
        steps=steps,
        epochs=None if num_rows is None else steps * setup.prompts_per_step / num_rows,
        disk_bytes=(NUM_CHECKPOINTS + 1) * (trained + optimizer_bytes(setup)) + trained,
    )


def full_report(
    setup: Setup, title: str, memory_gib: float | None, steps: int, num_rows: int | None = None
) -> str:
    """Memory line by line, then the sizes of the run; `check_fits` decides whether it fits."""
    memory = memory_report(setup, title, memory_gib)
    return f"{memory}\n\n{run_report(setup, steps, num_rows)}"


def memory_report(setup: Setup, title: str, memory_gib: float | None) -> str:
    """The memory that the run needs, line by line."""
    memory = memory_plan(setup, memory_gib)
    lines = [f"{title}: computed, not measured on a GPU", ""]
    for item in memory.items:
        phase = "" if item.phase == "always" else f" [{item.phase} only]"
        about = "~" if item.estimate else " "
        lines.append(f"  {about}{size(item.bytes):>10}  {item.name:<12} {item.note}{phase}")
    lines.append(f"  ~{size(memory.peak):>10}  at the peak")
    if memory.needed > memory.peak:
        lines.append(
            f"  ~{size(memory.needed):>10}  of a GPU, so that vLLM starts in "
            f"{setup.gpu_memory_utilization:.0%} of it"
        )
    if memory_gib is not None:
        lines.append(
            f"   {memory_gib:6.2f} GiB  on the GPU: it {'fits' if memory.fits else 'does not fit'}"
        )
    if memory.host:
        lines.append(
            f"  ~{size(memory.host):>10}  of the computer's own memory, for inputs of recomputed "
            "layers"
        )
    if memory.rollouts_at_once < setup.completions_per_step:
        lines.append(
            f"  vLLM runs {memory.rollouts_at_once} completions at a time, the others wait"
        )
    if setup.use_vllm and setup.weight_bits == 4:
        lines.append("  vLLM from 0.28 needs the package vllm-bnb-plugin for 4-bit weights")
    return _wrap(lines, NOTES)


def run_report(setup: Setup, steps: int, num_rows: int | None = None) -> str:
    """Completions and tokens a step, passes over the rows, and disk."""
    sizes = step_plan(setup, steps, num_rows)
    epochs = "" if sizes.epochs is None else f" ({sizes.epochs:.2f} passes over {num_rows:,} rows)"
    lines = [
        "run",
        f"  {sizes.prompts_per_step} prompts x {setup.num_generations} = "
        f"{sizes.completions_per_step} completions a step, at most {sizes.tokens_per_step:,} "
        f"tokens, {_settings(setup)}",
        f"  {sizes.steps:,} steps{epochs}",
        f"  {size(sizes.disk_bytes)} on disk: {NUM_CHECKPOINTS} checkpoints, one being "
        "written, and the result",
        "  time: not known before the first step",
    ]
    return _wrap(lines, 4)


def what_fits() -> list[dict[str, str]]:
    """A table of models by GPUs: the GiB needed and the settings, or "no" with the GiB."""
    rows = []
    for model in MODELS.values():
        if model.dtype == "float32":
            continue
        row = {"model": model.name}
        for card in CARDS.values():
            setup = fit_to_memory(setup_for(model, card), card.memory_gib)
            memory = memory_plan(setup, card.memory_gib)
            cell = f"{memory.needed / GIB:.1f}: {_settings(setup)}"
            if not memory.fits:
                cell = f"no ({memory.needed / GIB:.1f})"
            row[f"{card.name} GB ({card.memory_gib} GiB)"] = cell
        rows.append(row)
    return rows


def _settings(setup: Setup) -> str:
    bits = "full" if setup.lora_rank is None else f"{setup.weight_bits}-bit"
    rollouts = "vLLM" if setup.use_vllm else "transformers"
    return f"{bits}, {rollouts}, micro-batch {min(setup.micro_batch, setup.completions_per_step)}"


def _wrap(lines: list[str], indent: int) -> str:
    """Breaks lines that are longer than a terminal, and indents the rest."""
    return "\n".join(
        textwrap.fill(line, COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)
        for line in lines
    )


def duration(seconds: float) -> str:
    """Seconds for people: "45 s", "12 min", "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Bytes for people: "4.2 MiB", "14.19 GiB"."""
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"
