"""The steps of the quickstart and their estimated time, printed before it starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they load PyTorch, which `--help` does without
    from sage_unsloth.sampling.engines import SamplingConfig
    from sage_unsloth.training.rlvr_config import RlvrConfig
    from sage_unsloth.training.sft_stage import SftConfig

# For the estimate: seconds of one SFT row, one completion in RL and one in the evaluation.
UNIT_SECONDS = {"start": 30.0, "sft_row": 0.01, "rollout": 0.02, "sample": 0.0065}
MEASURED_ON = "as measured on two CPU cores without a GPU, November 2026"


def rl_seconds(rl: "RlvrConfig") -> float:
    return rl.max_steps * rl.completions_per_step * UNIT_SECONDS["rollout"]


def plan(
    out: Path,
    sft: "SftConfig",
    runs: Sequence[str],
    rl: "RlvrConfig",
    sampling: "SamplingConfig",
    problems: int,
    count: int,
    why: str,
) -> str:
    """The text of the plan.

    Args:
        sft, rl, sampling: settings; `rl` of each of `runs`.
    """
    total = (1 + len(runs)) * problems * sampling.num_samples
    # Runs side by side load the libraries once more, all at the same time.
    seconds = UNIT_SECONDS["start"] * (1 + (count > 1)) + total * UNIT_SECONDS["sample"]
    seconds += sft.max_steps * sft.batch_size * UNIT_SECONDS["sft_row"]
    # Rounded up: the last runs take as long as a full round.
    seconds += -(-len(runs) // count) * rl_seconds(rl)
    steps = f"{rl.max_steps} steps of {rl.completions_per_step} completions"
    steps += f" ({rl.prompts_per_step} problems x {rl.num_generations})"
    samples = (
        f"{1 + len(runs)} models x {problems} held-out problems x {sampling.num_samples} samples"
    )
    parts = [("SFT", f"{sft.max_steps} steps of {sft.batch_size} worked solutions")]
    parts += [(name, steps) for name in runs]
    parts += [("pass@k", f"{samples} = {total:,} completions")]
    lines = [f"Quickstart -> {out}"]
    lines += [f"  {number}. {name:<12} {text}" for number, (name, text) in enumerate(parts, 1)]
    if len(runs) > 1:
        how = "one after another" if count == 1 else f"in parallel, {count} at a time"
        lines += [f"The RL runs train {how}: {why}."]
    lines += [
        f"Estimate: {max(1, round(seconds / 60))} min ({MEASURED_ON}). The progress bars show "
        "the pace of this machine.",
        "You can stop at any time: the current step is saved first, and the same command resumes "
        "from there.\n",
    ]
    return "\n".join(lines)
