"""Chooses model, bits, engine and sizes of a notebook for the available GPU, with reasons."""

import math
from dataclasses import dataclass
from pathlib import Path

from sage_unsloth.models.embedded import BASE_MODEL, is_small
from sage_unsloth.planning.fitting import check_fits, memory_of_card, plan_setup
from sage_unsloth.planning.memory import GIB, memory_plan
from sage_unsloth.planning.presets import MODELS, ModelPreset, model_preset, nearest_card
from sage_unsloth.planning.setup import Setup, setup_for
from sage_unsloth.sampling.engine_choice import why_not_chosen
from sage_unsloth.training.starting import model_path

CHANGE_RUNTIME = (
    "For a GPU: Colab, Runtime > Change runtime type > T4 GPU. Kaggle, Settings > Accelerator > "
    "GPU T4 x2. Then run all cells again."
)


@dataclass(frozen=True, kw_only=True, repr=False)
class CardPlan:
    """The settings of a notebook that depend on the GPU.

    Attributes:
        model: for `load_policy`: a hub id, a folder, or "arithmetic-base".
        load_in_4bit, micro_batch, recompute_logits, gpu_memory_utilization: see `RlvrConfig`.
        rollouts: "vllm" or "transformers".
        max_prompt, max_completion: of RL, tokens.
        sft_length: of an SFT row, tokens.
        prompts_per_step, num_generations: problems in a step, completions of each.
        reasons: one sentence for each choice, the most important first.
    """

    gpu: bool
    model: str
    load_in_4bit: bool
    micro_batch: int
    recompute_logits: bool
    gpu_memory_utilization: float
    rollouts: str
    max_prompt: int
    max_completion: int
    sft_length: int
    steps: int
    prompts_per_step: int
    num_generations: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.reasons)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        first, *others = self.reasons
        return "\n".join([f"**{first}**", "", *(f"- {reason}" for reason in others)])


def plan_for_card(*models: str | Path, memory: float | None = None) -> CardPlan:
    """Settings for the first of these models that fits on the GPU.

    All models are tried with 16-bit weights first, then with 4 bits. Without a GPU the choice is
    the embedded model, or a folder with a model as small.

    Args:
        models: presets or hub ids, the preferred one first. A `Path` is a folder of another
            notebook, skipped if it does not exist.
        memory: GiB, as in `planning.fitting.memory_of_card`; None asks this machine.

    Raises:
        ValueError: no model fits the GPU.
    """
    gib = memory_of_card(memory)
    passed = []
    for model in models:
        if isinstance(model, Path) and (reason := _why_not_this_folder(model, gib)) is not None:
            passed.append(f"Not {model}: {reason}.")
    usable = [m for m in models if not isinstance(m, Path) or _why_not_this_folder(m, gib) is None]
    if gib is None:
        folder = next((str(m) for m in usable if isinstance(m, Path)), BASE_MODEL)
        return _without_gpu(folder, models, passed)
    here = memory is None
    setups = [(model, _setup(model, gib, bits, here)) for bits in (16, 4) for model in usable]
    # The first that fits wins: preferred models come first, all in 16 bits before any in 4.
    for model, setup in setups:
        needed = memory_plan(setup, gib)
        if needed.fits:
            card = nearest_card(gib)
            bits = f"{setup.weight_bits} bits"
            first = (
                f"A GPU of {gib:.1f} GiB (planned as {card.cards}): {model} in {bits} with an "
                f"adapter needs about {needed.needed / GIB:.1f} GiB (computed, not measured)."
            )
            too_large = [
                f"Not {other}: in 16 bits it needs {memory_plan(tried, gib).needed / GIB:.1f} GiB."
                for other, tried in setups[: usable.index(model)]
            ]
            return _choose(model, setup, gib, here, (first, *passed, *too_large))
    if not setups:
        raise ValueError(f"a GPU run needs exactly one model, got {', '.join(map(str, models))}")
    # None fits: this raises with what the last one, in 4 bits, would need.
    check_fits(setups[-1][1], gib)
    raise AssertionError("check_fits refuses what does not fit")


def _why_not_this_folder(folder: Path, gib: float | None) -> str | None:
    """Why another notebook's model is not used; None if it is."""
    if not folder.is_dir():
        return "no such folder, so the notebook that makes it has not run here"
    if is_small(folder) and gib is not None:
        return "it is the embedded model, which was trained without a GPU"
    if not is_small(folder) and gib is None:
        return "it is too large to train without a GPU"
    return None


def _setup(model: str | Path, gib: float, bits: int, here: bool) -> Setup:
    vllm = _why_no_vllm(gib, bits, here) is None
    changes = {"weight_bits": bits, "lora_rank": 8, "use_vllm": vllm}
    return plan_setup(model_preset(str(model)), gib, **changes)


def _why_no_vllm(gib: float, bits: int, here: bool) -> str | None:
    """Why rollouts do not use vLLM, from this machine's GPU or another one's preset."""
    if here:
        return why_not_chosen(load_in_4bit=bits == 4)
    if nearest_card(gib).use_vllm:
        return None
    return "the pinned vLLM needs compute capability 8.0, which such a card does not have"


def _choose(
    model: str | Path, setup: Setup, gib: float, here: bool, reasons: tuple[str, ...]
) -> CardPlan:
    preset = model_preset(str(model))
    rollouts = "vllm" if setup.use_vllm else "transformers"
    why = _why_no_vllm(gib, setup.weight_bits, here)
    because = "" if why is None else f", because {why}"
    # A micro-batch must divide the completions of a step.
    micro_batch = math.gcd(setup.micro_batch, setup.completions_per_step)
    return _plan(
        preset,
        setup,
        gpu=True,
        model=str(model) if Path(model).is_dir() else model_path(preset),
        micro_batch=micro_batch,
        rollouts=rollouts,
        reasons=(
            *reasons,
            f"Completions by {rollouts}{because}.",
            f"{setup.prompts_per_step} x {setup.num_generations} completions a step, "
            f"{micro_batch} at a time in the loss, prompts of at most {setup.max_prompt_length:,} "
            f"tokens, completions of {setup.max_completion_length:,}.",
        ),
    )


def _without_gpu(model: str, models: tuple[str | Path, ...], passed: list[str]) -> CardPlan:
    preset = MODELS[BASE_MODEL]
    setup = setup_for(preset)
    named = next((str(m) for m in models if not isinstance(m, Path)), "a model of your own")
    what = "" if model == BASE_MODEL else f" (from {model})"
    return _plan(
        preset,
        setup,
        gpu=False,
        model=model,
        micro_batch=setup.micro_batch,
        rollouts="transformers",
        reasons=(
            f"No GPU here: the embedded arithmetic model of 0.7 M parameters{what} is trained "
            f"instead of {named}. {CHANGE_RUNTIME}",
            *passed,
            f"{setup.prompts_per_step} x {setup.num_generations} completions a step, prompts of "
            f"at most {setup.max_prompt_length} tokens, completions of "
            f"{setup.max_completion_length}.",
        ),
    )


def _plan(
    preset: ModelPreset,
    setup: Setup,
    *,
    gpu: bool,
    model: str,
    micro_batch: int,
    rollouts: str,
    reasons: tuple[str, ...],
) -> CardPlan:
    return CardPlan(
        gpu=gpu,
        model=model,
        load_in_4bit=setup.weight_bits == 4,
        micro_batch=micro_batch,
        recompute_logits=setup.recompute_logits,
        gpu_memory_utilization=setup.gpu_memory_utilization,
        rollouts=rollouts,
        max_prompt=setup.max_prompt_length,
        max_completion=setup.max_completion_length,
        sft_length=preset.sft_max_length,
        steps=preset.rl_steps,
        prompts_per_step=setup.prompts_per_step,
        num_generations=setup.num_generations,
        reasons=reasons,
    )
