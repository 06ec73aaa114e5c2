"""The start of a run: model, adapter, and the settings that preset and GPU decide."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu, release_memory
from sage_unsloth.models.embedded import BASE_MODEL, data_folder, locate_model
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.merging import save_merged
from sage_unsloth.planning.fitting import fit_to_memory, memory_of_card
from sage_unsloth.planning.presets import ModelPreset, model_preset, nearest_card
from sage_unsloth.planning.setup import Setup, preset_setup
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import read_record
from sage_unsloth.sampling.engine_choice import why_no_vllm, why_not_chosen
from sage_unsloth.trainers.backends import TRL, backend
from sage_unsloth.training import embedded_settings
from sage_unsloth.training.by_trl import PLANNED_BY_TRL
from sage_unsloth.training.ledger import result_folder
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig

logger = logging.getLogger(__name__)

EMBEDDED = BASE_MODEL  # its preset is named after its folder
SMOKE: dict[str, dict[str, Any]] = {
    "sft": {"max_steps": 2, "batch_size": 4, "save_steps": 1},
    "rlvr": {
        "max_steps": 2,
        "prompts_per_step": 2,
        "num_generations": 4,
        "save_steps": 1,
        "preflight_prompts": 4,
        "sample_steps": 1,
    },
}
"""Settings of a run that only checks that everything works; its figures mean nothing."""


@dataclass(frozen=True)
class StartingPoint:
    """What RL starts from.

    Attributes:
        preset: the model's sizes and the paper's settings for it.
        model: folder or hub id of the model below the adapter; π_ref.
        adapter: the adapter to continue training, or None for a fresh one.
    """

    preset: ModelPreset
    model: str
    adapter: Path | None = None

    @property
    def unmerged(self) -> Path | None:
        """The RL run that `merge_run` must merge before `model` exists, or None."""
        folder = Path(self.model).parent
        pending = (folder / "run.json").is_file() and not Path(self.model).exists()
        return folder if pending else None

    def __str__(self) -> str:
        which = "the model that RL starts from"
        if self.adapter is not None:
            which = f"the model below {self.adapter}, which is trained further"
        return f"π_ref: {self.model}, {which}"


def starting_point(start: str | Path, reference: str) -> StartingPoint:
    """The model that RL starts from, and its reference.

    reference   start          trained                               π_ref
    "sft"       an SFT run     a fresh adapter on its merged model   that model
    "sft"       an RL run      a fresh adapter on its merged model   that model
    "sft"       a model        a fresh adapter on it                 the model
    "base"      an SFT run     its adapter                           the model before SFT
    "base"      an RL run      its adapter                           that run's own π_ref
    "base"      a model        (refused)

    Raises:
        ValueError: a run that is not complete, or not a training run; or reference "base" without
            an adapter.
    """
    folder = Path(start)
    run = read_record(folder)
    if run is None:
        if reference == "base":
            raise ValueError(
                f"reference='base' needs a start with an adapter (an SFT or RL run), got {start}. "
                "Give its folder, or reference='sft'"
            )
        # OWNER/NAME could be a hub id; a path in runs/, or a deeper one, cannot.
        if not folder.exists() and (folder.parts[0] == "runs" or len(folder.parts) > 2):
            raise ValueError(
                "RL starts from the folder of a run, a model's folder, a preset or a hub id, but "
                f"there is no folder {start}. Train it first (python -m sage_unsloth sft --out "
                f"{start}), or check the path"
            )
        preset = model_preset(start)
        return StartingPoint(preset, model_path(preset))
    stage = run["settings"].get("stage")
    if stage not in ("sft", "rlvr"):
        raise ValueError(
            f"RL starts from an SFT run, an RL run or a model, but {start} is a run of {stage!r}"
        )
    full = run["settings"].get("full_finetuning", False)
    result = result_folder(folder, run["settings"])
    if not result.is_dir():
        raise ValueError(
            f"a run must be complete before RL starts from it, but {start} has no {result.name} "
            "yet. Run its command again"
        )
    below = _model_below(run)
    preset = trained_preset(str(folder / "model") if reference == "sft" else below)
    if reference == "sft":
        return StartingPoint(preset, str(folder / "model"))
    # Without an adapter there is nothing to switch off for π_ref.
    if full:
        raise ValueError(
            f"reference='base' needs a start with an adapter, but {start} trained every weight. "
            "Give reference='sft'"
        )
    return StartingPoint(preset, below, folder / "adapter")


def merge_run(folder: Path) -> None:
    """Writes `model/` of an RL run, complete or not at all: its start model with its adapter
    merged.

    A second stage starts from it.
    """
    run = read_record(folder) or {}
    with exclusive_lock(folder):
        if (folder / "model").exists():
            return
        logger.info("Merging the adapter of %s into %s.", folder, folder / "model")
        model, tokenizer = load_policy(_model_below(run), adapter=folder / "adapter")
        save_merged(model, tokenizer, folder / "model")
        del model
        release_memory()


def _model_below(run: dict) -> str:
    """The model that a run began with; the embedded one may be elsewhere on this machine."""
    path = Path(run["model_path"])
    # The run was made on another machine, with the package in another place.
    moved = path.is_absolute() and not path.is_dir() and path.name == EMBEDDED
    return str(data_folder() / EMBEDDED) if moved else run["model_path"]


def trained_preset(path: str) -> ModelPreset:
    """The preset of the first model in a chain of runs, found from the last one.

    Of a model that was not trained here its own.
    """
    if Path(path).name == "model" and (run := read_record(Path(path).parent)) is not None:
        below = _model_below(run)
        # Made elsewhere, from a model of the same architecture.
        gone = Path(below).is_absolute() and not Path(below).is_dir()
        return model_preset(path) if gone else trained_preset(below)
    return model_preset(EMBEDDED if Path(path) == data_folder() / EMBEDDED else path)


def model_path(preset: ModelPreset) -> str:
    """Folder or hub id of a preset; the embedded model is part of the package."""
    return locate_model(preset.hub_id)


def sft_config(preset: ModelPreset, recorded: dict | None = None, **settings: Any) -> SftConfig:
    """Table 7 at the preset's length, in 4 bits if the GPU needs it; `settings` win.

    A resumed run has the bits of `recorded`; 4 bits need Unsloth.
    """
    if preset.name == EMBEDDED:
        return replace(embedded_settings.SFT, **settings)
    gib = memory_of_card(None)
    four_bit = gib is not None and backend() != TRL and nearest_card(gib).load_in_4bit
    if recorded is not None:
        four_bit = recorded["load_in_4bit"]
    config = SftConfig(max_length=preset.sft_max_length, load_in_4bit=four_bit)
    return replace(config, **settings)


CARD_SETTINGS = ("load_in_4bit", "micro_batch_size", "recompute_logits", "gpu_memory_utilization")
"""Decided by the GPU unless given; a resumed run keeps the values of its first GPU."""


def rlvr_config(
    preset: ModelPreset, gib: float | None = None, recorded: dict | None = None, **settings: Any
) -> RlvrConfig:
    """Table 8 at the preset's lengths, adapted to a GPU of `gib` GiB.

    Args:
        gib: memory of the GPU; None leaves the defaults.
        recorded: settings of the run to resume, which replace this GPU's.
        settings: fields of the config, which win over preset and GPU.
    """
    if settings.get("backend") == TRL:  # both are Unsloth-only
        settings = {"load_in_4bit": False, "recompute_logits": False} | settings
    if preset.name == EMBEDDED:
        preflight = {"preflight_prompts": RlvrConfig.preflight_prompts}
        return replace(embedded_settings.RLVR, **(preflight | settings))
    config = RlvrConfig(
        max_prompt_length=preset.max_prompt_length,
        max_completion_length=preset.max_completion_length,
        max_steps=preset.rl_steps,
        prompts_per_step=preset.prompts_per_step,
        num_generations=preset.num_generations,
        full_finetuning=preset.full_finetuning,
    )
    config = replace(config, **settings)
    # A resumed run keeps its settings, whatever GPU it resumes on.
    if recorded is not None:
        selected = {name: recorded[name] for name in CARD_SETTINGS if name not in settings}
        return replace(config, **selected)
    if gib is None:
        return config
    return replace(config, **(_decided_by_card(preset, config, gib, settings) | settings))


def _decided_by_card(
    preset: ModelPreset, config: RlvrConfig, gib: float, settings: dict[str, Any]
) -> dict[str, Any]:
    """Values of `CARD_SETTINGS` with which the run fits; those in `settings` are fixed."""
    card = nearest_card(gib)
    if card.gpu_memory_utilization is not None and "gpu_memory_utilization" not in settings:
        config = replace(config, gpu_memory_utilization=card.gpu_memory_utilization)
    setup = replace(
        run_setup(preset, config, gib),
        micro_batch=config.micro_batch_size or min(card.micro_batch, config.completions_per_step),
        recompute_logits=settings.get("recompute_logits", card.recompute_logits),
        weight_bits=_bits(config.full_finetuning, config.load_in_4bit or card.load_in_4bit),
    )
    fields_of_setup = {
        "load_in_4bit": "weight_bits",
        "micro_batch_size": "micro_batch",
        "recompute_logits": "recompute_logits",
    }
    # `fit_to_memory` may only change what the user did not set.
    fixed = [field for name, field in fields_of_setup.items() if name in settings]
    setup = fit_to_memory(setup, gib, fixed)
    return {
        "load_in_4bit": setup.weight_bits == 4,
        "micro_batch_size": math.gcd(setup.micro_batch, config.completions_per_step),
        "recompute_logits": setup.recompute_logits,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }


def _bits(full_finetuning: bool, load_in_4bit: bool) -> int:
    """Bits of a weight; full fine-tuning needs 32, because small updates are lost in 16."""
    return 32 if full_finetuning else 4 if load_in_4bit else 16


def run_setup(preset: ModelPreset, config: RlvrConfig, gib: float | None) -> Setup:
    """A run's settings for its memory plan; without a GPU (`gib` None) weights have 32 bits."""
    full = config.full_finetuning
    bits = {} if preset.name == EMBEDDED else {"weight_bits": _bits(full, config.load_in_4bit)}
    if gib is None and not config.load_in_4bit:
        bits = {"weight_bits": 32}
    setup = preset_setup(
        preset,
        None,
        lora_rank=None if full else config.lora.rank,
        lora_targets=config.lora.targets,
        beta=config.beta,
        max_prompt_length=config.max_prompt_length,
        max_completion_length=config.max_completion_length,
        prompts_per_step=config.prompts_per_step,
        num_generations=config.num_generations,
        micro_batch=config.micro_batch_size or config.completions_per_step,
        recompute_logits=config.recompute_logits,
        use_vllm=_uses_vllm(config, gib),
        gpu_memory_utilization=config.gpu_memory_utilization,
        **bits,
    )
    return setup if config.backend != TRL else replace(setup, **PLANNED_BY_TRL)


def _uses_vllm(config: RlvrConfig, gib: float | None) -> bool:
    """Whether rollouts use vLLM; for another machine's GPU its preset decides."""
    full = config.full_finetuning
    if config.backend == TRL:
        return config.rollouts == "vllm"
    if full or config.rollouts == "transformers":
        return False
    if gib is not None and not has_gpu():
        return nearest_card(gib).use_vllm
    reason = why_no_vllm if config.rollouts == "vllm" else why_not_chosen
    return reason(full_finetuning=full, load_in_4bit=config.load_in_4bit) is None
