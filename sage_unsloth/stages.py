"""The two stages as a person starts them, from the command line or a notebook: plan, data, training, table, next command."""

import json
import logging
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sage_unsloth.algorithms import Algorithm, get_algorithm
from sage_unsloth.corpora import Corpus, hold_out, rl_corpus, sft_corpus
from sage_unsloth.models import data_folder, has_gpu, load_policy, load_tokenizer
from sage_unsloth.plots import plot_training, show_table
from sage_unsloth.preflight import signal
from sage_unsloth.presets import ModelPreset, card_preset, model_preset
from sage_unsloth.records import write_json
from sage_unsloth.rlvr import RlvrConfig, rlvr
from sage_unsloth.sampling import SamplingConfig, sample_and_grade
from sage_unsloth.sft import SftConfig, sft
from sage_unsloth.training import read_metrics

logger = logging.getLogger(__name__)

SMOKE = {
    "sft": {"max_steps": 2, "batch_size": 4, "save_steps": 1, "max_length": 160},
    "rlvr": {"max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "save_steps": 1, "preflight_prompts": 4,
             "sample_steps": 1, "max_prompt_length": 64, "max_completion_length": 48, "min_p": 0.0},
}  # fmt: skip
"""Settings of a run that only shows that everything works; its figures mean nothing."""


def run_sft(
    out: str | Path,
    *,
    model: str | Path,
    data: str = "openmath",
    path: str | Path | None = None,
    held_out: int = 32,
    limit: int | None = None,
    smoke: bool = False,
    **settings: Any,
) -> list[dict]:
    """Stage 1: filter the rows, train, and compare the model before and after on held-out rows.

    Args:
        out: folder of the run; a second run in it resumes.
        model: a preset's name, a folder or a hub id.
        data, path, limit: see `corpora.sft_corpus`.
        held_out: rows kept from training for the comparison; 0 leaves it out.
        smoke: a run of seconds that only shows that everything works.
        settings: fields of `SftConfig`, in place of the preset's.

    Returns:
        The comparison: shares of completions in format, parsed and right, before and after.

    Raises:
        ValueError: see `sft`, `sft_corpus`.
    """
    preset = model_preset(model)
    if not preset.sft_first:
        logger.warning("%s starts with RL in the paper, without SFT.", preset.name)
    start = model_path(preset)
    config = replace(sft_config(preset), **((SMOKE["sft"] if smoke else {}) | settings))
    corpus = sft_corpus(load_tokenizer(start), config.max_length, data=data, path=path, limit=limit)
    training, kept = hold_out(corpus.rows, min(held_out, len(corpus.rows) // 2))
    steps = config.max_steps if config.max_steps > 0 else -(-len(training) * config.epochs // config.batch_size)  # fmt: skip
    print(f"SFT of {preset.name} -> {out}\n")
    _show_corpus(corpus)
    print(f"\n{len(training):,} rows to train on, {len(kept)} held out; {steps:,} steps of {config.batch_size}.\n")  # fmt: skip
    merged = sft(config, start, training, out)
    table = before_and_after(config, start, merged, kept, out) if kept else []
    if table:
        print(f"\n{len(kept)} held-out rows, {SAMPLES} completions each at T = 1:\n")
        show_table(table)
    print(f"\nNext: python -m sage_unsloth train --algorithm sage-branch --from {out} --out runs/sage-branch")  # fmt: skip
    return table


SAMPLES = 4  # completions of each held-out row


def before_and_after(
    config: SftConfig, start: str | Path, merged: Path, rows: Sequence[dict], out: str | Path
) -> list[dict]:
    """Shares of completions in format, parsed and right, before and after SFT; kept in `before_after.json`."""
    folder = Path(out) / "held-out"
    folder.mkdir(exist_ok=True)
    sampling = SamplingConfig(
        num_samples=SAMPLES,
        max_completion_length=config.max_length // 2,
        batch_size=32,
        seed=config.seed,
    )
    table = []
    for name, path in {"before": start, "after": merged}.items():
        model, tokenizer = load_policy(
            path, max_length=config.max_length, load_in_4bit=config.load_in_4bit
        )
        records = sample_and_grade(
            sampling, model, tokenizer, rows, folder / f"{name}.jsonl", f"{name} SFT"
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
    data: str = "dapo",
    path: str | Path | None = None,
    limit: int | None = 2000,
    memory_gib: float | None = None,
    smoke: bool = False,
    **settings: Any,
) -> list[dict]:
    """Stage 2: plan, filter the prompts, train one algorithm, draw its course.

    Args:
        out: folder of the run; a second run in it resumes.
        algorithm: a row of `algorithms.ALGORITHMS`, or one of your own.
        start: folder of an SFT run, or a preset's name, a model folder or a hub id.
        data, path, limit: see `corpora.rl_corpus`.
        memory_gib: of the card, for the plan; None asks the card.
        smoke: a run of seconds that only shows that everything works.
        settings: fields of `RlvrConfig`, in place of the preset's.

    Returns:
        The rows of `metrics.jsonl`.

    Raises:
        ValueError: see `rlvr`, `rl_corpus`; or the plan does not fit the card, with what to change.
    """
    if isinstance(algorithm, str):
        algorithm = get_algorithm(algorithm)
    reference = settings.get("reference", "sft")
    point = starting_point(start, reference)
    config = rlvr_config(point.preset)
    config = replace(config, **((SMOKE["rlvr"] if smoke else {}) | settings))
    config = algorithm.configure(config)
    corpus = rl_corpus(
        load_tokenizer(point.model), config.max_prompt_length, data=data, path=path, limit=limit
    )
    print(f"{algorithm.name} from {start} -> {out}\n")
    _show_corpus(corpus)
    rlvr(
        config,
        point.model,
        corpus.rows,
        out,
        algorithm.guide,
        algorithm.name,
        adapter=point.adapter,
    )
    metrics = read_metrics(out)
    plot_training(
        {algorithm.name: metrics}, Path(out) / "training.png", f"{point.preset.name}, seed {config.seed}; thin: each step"
    )  # fmt: skip
    print(f"\nNext: python -m sage_unsloth evaluate ...")
    return metrics
