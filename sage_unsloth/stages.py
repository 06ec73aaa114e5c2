"""The two stages as a person starts them, from the command line or a notebook: data, plan, training, table, next command."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sage_unsloth import plan
from sage_unsloth.algorithms import SETTINGS, Algorithm, get_algorithm
from sage_unsloth.corpora import hold_out, rl_corpus, sft_corpus
from sage_unsloth.engines import SamplingConfig, TransformersEngine
from sage_unsloth.memory import Setup, setup_for
from sage_unsloth.models import data_folder, has_gpu, load_policy, load_tokenizer
from sage_unsloth.patch import load_unsloth
from sage_unsloth.plots import plot_training, show_table
from sage_unsloth.preflight import signal
from sage_unsloth.presets import ModelPreset, model_preset, nearest_card
from sage_unsloth.quickstart import QuickstartConfig, settle_process
from sage_unsloth.records import write_json
from sage_unsloth.rlvr import RlvrConfig, rlvr
from sage_unsloth.rollouts import why_no_vllm
from sage_unsloth.sampling import sample_and_grade
from sage_unsloth.sft import SftConfig, sft
from sage_unsloth.training import read_metrics

EMBEDDED = "arithmetic-base"
SMOKE = {
    "sft": {"max_steps": 2, "batch_size": 4, "save_steps": 1},
    "rlvr": {"max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "save_steps": 1, "preflight_prompts": 4,
             "sample_steps": 1},
}  # fmt: skip
"""Settings of a run that only shows that everything works; its figures mean nothing."""
SAMPLES = 4  # completions of each held-out row, before and after SFT


@dataclass(frozen=True)
class StartingPoint:
    """What RL starts from.

    Attributes:
        preset: the model's sizes and how the paper trains it.
        model: folder or hub id of the model below the adapter; π_ref.
        adapter: goes on being trained, or None for a fresh one.
    """

    preset: ModelPreset
    model: str
    adapter: Path | None = None


def starting_point(start: str | Path, reference: str) -> StartingPoint:
    """Where RL starts and what its reference is.

    From an SFT run with reference "sft": the merged model with a fresh adapter. With "base": the model that SFT started from
    with SFT's adapter on it, so that π_ref is the model before SFT. A model that is no SFT run is its own reference.

    Raises:
        ValueError: not an SFT run that is complete; or reference "base" where there was no SFT.
    """
    folder = Path(start)
    if not (folder / "run.json").is_file():
        if reference == "base":
            raise ValueError(
                f"reference='base' is the model before SFT, so RL must start from an SFT run; got {start}; give the folder of "
                "an SFT run, or reference='sft', which is the model itself"
            )
        preset = model_preset(start)
        return StartingPoint(preset, model_path(preset))
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if run["settings"].get("stage") != "sft":
        raise ValueError(
            f"RL starts from an SFT run or a model; {start} is a run of {run['settings'].get('stage')!r}; give another folder"
        )
    if not (folder / "model").is_dir():
        raise ValueError(
            f"SFT must be complete before RL; {start} has no model yet; run its command again, it goes on where it stopped"
        )
    below = run["model_path"]
    if Path(below) == data_folder() / EMBEDDED:
        below = EMBEDDED
    preset = model_preset(below)
    if reference == "base":
        return StartingPoint(preset, model_path(preset), folder / "adapter")
    return StartingPoint(preset, str(folder / "model"))


def model_path(preset: ModelPreset) -> str:
    """Folder or hub id of a preset; the embedded model lies with the project's data."""
    return str(data_folder() / EMBEDDED) if preset.name == EMBEDDED else preset.hub_id


def sft_config(preset: ModelPreset, **settings: Any) -> SftConfig:
    """Table 7 at the preset's length, in 4 bit on a card that needs it; `settings` come last."""
    if preset.name == EMBEDDED:
        return replace(QuickstartConfig().sft, **settings)
    gib = plan.memory_of_card(None)
    config = SftConfig(
        max_length=preset.sft_max_length,
        load_in_4bit=gib is not None and nearest_card(gib).load_in_4bit,
    )
    return replace(config, **settings)


CARD_SETTINGS = ("load_in_4bit", "micro_batch_size", "recompute_logits", "gpu_memory_utilization")
"""What the card decides, unless it is given; a run that goes on keeps what its first card decided."""


def rlvr_config(
    preset: ModelPreset, gib: float | None = None, recorded: dict | None = None, **settings: Any
) -> RlvrConfig:
    """Table 8 at the preset's lengths, with what a card of `gib` GiB needs.

    Args:
        gib: memory of the card; None leaves the defaults.
        recorded: settings of the run that goes on; what a card decides comes from there.
        settings: come last.
    """
    if preset.name == EMBEDDED:
        return replace(QuickstartConfig().rlvr, **settings)
    config = RlvrConfig(
        max_prompt_length=preset.max_prompt_length,
        max_completion_length=preset.max_completion_length,
        full_finetuning=preset.full_finetuning,
    )
    config = replace(config, **settings)
    if recorded is not None:
        kept = {name: recorded[name] for name in CARD_SETTINGS if name not in settings}
        return replace(config, **kept)
    if gib is None:
        return config
    card = nearest_card(gib)
    setup = replace(
        setup_of(preset, config, gib),
        micro_batch=config.micro_batch_size or min(card.micro_batch, config.completions_per_step),
        recompute_logits=settings.get("recompute_logits", card.recompute_logits),
        weight_bits=16 if config.full_finetuning or not (config.load_in_4bit or card.load_in_4bit) else 4,
    )  # fmt: skip
    fixed = [field for name, field in {"load_in_4bit": "weight_bits", "micro_batch_size": "micro_batch",
                                       "recompute_logits": "recompute_logits"}.items() if name in settings]  # fmt: skip
    setup = plan.settled(setup, gib, fixed)
    decided = {
        "load_in_4bit": setup.weight_bits == 4,
        "micro_batch_size": math.gcd(setup.micro_batch, config.completions_per_step),
        "recompute_logits": setup.recompute_logits,
        "gpu_memory_utilization": card.gpu_memory_utilization or config.gpu_memory_utilization,
    }
    return replace(config, **(decided | settings))


def setup_of(preset: ModelPreset, config: RlvrConfig, gib: float | None) -> Setup:
    """What the plan's arithmetic needs to know of a run."""
    full = config.full_finetuning
    card = None if gib is None else nearest_card(gib)
    bits = {} if preset.name == EMBEDDED else {"weight_bits": 4 if config.load_in_4bit else 16}
    vllm = config.rollouts != "transformers" and not full and (
        card.use_vllm if card is not None and not has_gpu() else why_no_vllm(full_finetuning=full, load_in_4bit=config.load_in_4bit) is None
    )  # fmt: skip
    return setup_for(
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
        use_vllm=vllm,
        gpu_memory_utilization=config.gpu_memory_utilization,
        **bits,
    )


def run_sft(
    out: str | Path,
    *,
    model: str | Path,
    data: str | None = None,
    path: str | Path | None = None,
    limit: int | None = None,
    held_out: int = 32,
    smoke: bool = False,
    **settings: Any,
) -> list[dict]:
    """Stage 1: filter the rows, train, and compare the model before and after on held-out rows.

    Args:
        out: folder of the run; a second run in it resumes.
        model: a preset's name, a folder or a hub id.
        data, path, limit: see `corpora.sft_corpus`; the embedded model has its own data.
        held_out: rows kept from training for the comparison; 0 leaves it out.
        smoke: a run of seconds that only shows that everything works.
        settings: fields of `SftConfig`, in place of the preset's.

    Returns:
        The comparison: shares of completions in format, parsed, right and cut, before and after.

    Raises:
        ValueError: see `sft` and `sft_corpus`.
    """
    load_unsloth()
    preset = model_preset(model)
    if preset.name == EMBEDDED:
        settle_process()
    start = model_path(preset)
    changes = (SMOKE["sft"] if smoke else {}) | settings
    config = sft_config(preset, **changes)
    corpus = sft_corpus(
        load_tokenizer(start),
        config.max_length,
        data=data or _data(preset, path, "openmath"),
        path=path,
        limit=limit,
    )
    training, kept = hold_out(corpus.rows, min(held_out, len(corpus.rows) // 4))
    steps = config.max_steps
    if steps == -1:
        steps = -(-len(training) // config.batch_size) * config.epochs
    print(f"SFT of {preset.name} -> {out}\n")
    show_table(corpus.table())
    print(
        f"\n{len(training):,} rows to train on, {len(kept)} held out; {steps:,} steps of {config.batch_size}.\n"
    )
    merged = sft(config, start, training, out)
    table = before_and_after(config, start, merged, kept, out) if kept else []
    if table:
        print(f"\n{len(kept)} held-out rows, {SAMPLES} completions each at temperature 1:\n")
        show_table(table)
    print(
        f"\nNext: python -m sage_unsloth train --algorithm sage-branch --from {out} --out runs/sage-branch"
    )
    return table


def before_and_after(
    config: SftConfig, start: str | Path, merged: Path, rows: Sequence[dict], out: str | Path
) -> list[dict]:
    """Shares of completions in format, parsed, right and cut, before and after SFT; kept in `before_after.json`."""
    folder = Path(out) / "held-out"
    folder.mkdir(exist_ok=True)
    sampling = SamplingConfig(
        num_samples=SAMPLES,
        temperature=1.0,
        max_completion_length=config.max_length // 2,
        seed=config.seed,
    )
    table = []
    for name, path in {"before": start, "after": merged}.items():
        model, tokenizer = load_policy(
            path, max_length=config.max_length, load_in_4bit=config.load_in_4bit
        )
        records = sample_and_grade(
            sampling,
            TransformersEngine(model, tokenizer),
            rows,
            folder / f"{name}.jsonl",
            model=f"{name} SFT",
            benchmark="held-out",
        )
        del model
        found = signal(records)
        table.append(
            {
                "model": f"{name} SFT",
                "in format": f"{found['format_rate']:.3f}",
                "parsed": f"{found['parsed_rate']:.3f}",
                "right": f"{found['solve_rate']:.3f}",
                "cut": f"{found['truncation_rate']:.3f}",
                "tokens": f"{found['mean_tokens']:.0f}",
            }
        )
    write_json(Path(out) / "before_after.json", table)
    return table


def run_rlvr(
    out: str | Path,
    *,
    algorithm: str | Algorithm,
    start: str | Path,
    data: str | None = None,
    path: str | Path | None = None,
    limit: int | None = 2000,
    memory: float | None = None,
    smoke: bool = False,
    **settings: Any,
) -> list[dict]:
    """Stage 2: filter the prompts, say what it needs, train by one algorithm, draw its course.

    Args:
        out: folder of the run; a second run in it resumes.
        algorithm: the name of a row of `algorithms.ALGORITHMS`, or an `Algorithm` of your own.
        start: folder of an SFT run, or a preset's name, a model folder or a hub id.
        data, path, limit: see `corpora.rl_corpus`; the embedded model has its own data.
        memory: of the card, GiB, for the plan; None asks the card.
        smoke: a run of seconds that only shows that everything works.
        settings: fields of `RlvrConfig`, in place of the preset's and of the algorithm's.

    Returns:
        The rows of `metrics.jsonl`, one an optimizer step.

    Raises:
        ValueError: see `rlvr` and `rl_corpus`; or the run does not fit the card, with what to change.
    """
    load_unsloth()
    if isinstance(algorithm, str):
        algorithm = get_algorithm(algorithm)
    point = starting_point(start, settings.get("reference", "sft"))
    if point.preset.name == EMBEDDED:
        settle_process()
    gib = plan.memory_of_card(memory)
    of_algorithm = {name: getattr(algorithm, name) for name in SETTINGS}
    changes = (SMOKE["rlvr"] if smoke else {}) | of_algorithm | settings
    config = rlvr_config(point.preset, gib, _recorded(out), **changes)
    corpus = rl_corpus(
        load_tokenizer(point.model),
        config.max_prompt_length,
        data=data or _data(point.preset, path, "dapo"),
        path=path,
        limit=limit,
    )
    print(f"{algorithm.name} from {start} -> {out}\n{algorithm.description}\n")
    show_table(corpus.table())
    setup = setup_of(point.preset, config, gib)
    if point.preset.name != EMBEDDED:
        print(f"\n{plan.memory_report(setup, point.preset.name, gib)}")
    print(f"\n{plan.run_report(setup, config.max_steps, len(corpus.rows))}\n")
    if gib is not None:
        plan.check_fits(setup, gib)
    trained = rlvr(
        config,
        point.model,
        corpus.rows,
        out,
        algorithm.guide,
        algorithm.name,
        adapter=point.adapter,
    )
    metrics = read_metrics(out)
    note = f"{point.preset.name}, seed {config.seed}; thin: each step, thick: moving average"
    plot_training({algorithm.name: metrics}, Path(out) / "training.png", note)
    print()
    show_table(course(metrics))
    print(
        f"\nWritten to {out}: metrics.jsonl, completions.jsonl, training.png, {trained.name}/\n\n"
        f"Next: {evaluation_command(point, algorithm.name, trained)}"
    )
    return metrics


def evaluation_command(point: StartingPoint, name: str, trained: Path) -> str:
    """The command that compares a trained model with what it started from."""
    before = f"{point.model}+{point.adapter}" if point.adapter else point.model
    after = f"{point.model}+{trained}" if trained.name == "adapter" else trained
    benchmark = "arithmetic" if point.preset.name == EMBEDDED else "aime amc23 math500-l5"
    return f"python -m sage_unsloth evaluate --models start={before} {name}={after} --benchmarks {benchmark}"


COURSE = {
    "reward": "reward",
    "kl/ref_k3": "KL to reference",
    "sage/entropy": "entropy",
    "sage/guide_mean": "guide",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "cut",
    "frac_reward_zero_std": "dead groups",
    "seconds": "seconds a step",
}


def course(metrics: Sequence[dict]) -> list[dict]:
    """First and last tenth of a run, averaged, as rows of a table; a metric that was not logged is left out."""
    tenth = max(1, len(metrics) // 10)
    rows = []
    for part, steps in {"first": metrics[:tenth], "last": metrics[-tenth:]}.items():
        row = {"steps": f"{part} {tenth}"}
        for metric, title in COURSE.items():
            values = [step[metric] for step in steps if metric in step]
            if values:
                row[title] = f"{sum(values) / len(values):.3f}"
        rows.append(row)
    return rows


def _recorded(out: str | Path) -> dict | None:
    """The settings of an RL run that is there already."""
    file = Path(out) / "run.json"
    if not file.is_file():
        return None
    run = json.loads(file.read_text(encoding="utf-8"))
    return (
        run["settings"] | run["free_settings"] if run["settings"].get("stage") == "rlvr" else None
    )


def _data(preset: ModelPreset, path: str | Path | None, default: str) -> str:
    return "arithmetic" if preset.name == EMBEDDED and path is None else default
