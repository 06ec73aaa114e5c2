"""The two stages as a person starts them, from the command line or a notebook: data, plan,
training, table, next command.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.figures import show_table
from sage_unsloth.models.device import frees_models, has_gpu, release_memory
from sage_unsloth.models.embedded import settle_process
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.patch.loading import load_unsloth
from sage_unsloth.planning.fitting import check_fits, memory_of_card
from sage_unsloth.planning.plan import memory_report, run_report
from sage_unsloth.planning.presets import ModelPreset, model_preset
from sage_unsloth.problems.corpora import hold_out, rl_corpus, sft_corpus
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.processes import rank
from sage_unsloth.runs.text import log_to_terminal
from sage_unsloth.sampling.engines import SamplingConfig, TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.algorithms import SETTINGS, Algorithm, get_algorithm
from sage_unsloth.training.figures import plot_training
from sage_unsloth.training.preflight import REPORT, SHARES, signal
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import SftConfig, sft
from sage_unsloth.training.stage import read_metrics
from sage_unsloth.training.starting import (
    EMBEDDED,
    SMOKE,
    StartingPoint,
    model_path,
    recorded_settings,
    rlvr_config,
    setup_of,
    sft_config,
    starting_point,
)

SAMPLES = 4  # completions of each held-out row, before and after SFT


@frees_models
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
    _show_log()
    load_unsloth()
    preset = model_preset(model)
    if preset.name == EMBEDDED:
        settle_process()
    start = model_path(preset)
    changes = (SMOKE["sft"] if smoke else {}) | settings
    config = sft_config(preset, recorded_settings(out, "sft"), **changes)
    corpus = sft_corpus(
        load_tokenizer(start),
        config.max_length,
        data=data or _data(preset, path, "openmath"),
        path=path,
        limit=limit,
    )
    training, kept = hold_out(corpus.rows, min(held_out, len(corpus.rows) // 4))
    dropped = len(corpus.rows) - len(training) - len(kept)
    steps = config.max_steps
    if steps == -1:
        steps = -(-len(training) // config.batch_size) * config.epochs
    print(f"SFT of {preset.name} -> {out}\n")
    show_table(corpus.table())
    print(
        f"\n{len(training):,} rows to train on, {len(kept)} held out, {dropped} left out because "
        f"they share a problem with "
        f"these; {steps:,} steps of {config.batch_size}.\n"
    )
    merged = sft(config, start, training, out)
    table = before_and_after(config, start, merged, kept, out) if kept else []
    if table:
        print(f"\n{len(kept)} held-out rows, {SAMPLES} completions each at temperature 1:\n")
        show_table(table)
    print(
        f"\nNext: python -m sage_unsloth train --algorithm sage-branch --from {out} --out "
        f"{Path(out).parent / 'sage-branch'}"
    )
    return table


def before_and_after(
    config: SftConfig, start: str | Path, merged: Path, rows: Sequence[dict], out: str | Path
) -> list[dict]:
    """Shares of completions in format, parsed, right and cut, before and after SFT; kept in
    `before_after.json`.
    """
    report = Path(out) / "before_after.json"
    if report.exists():
        return json.loads(report.read_text(encoding="utf-8"))
    folder = Path(out) / "held-out"
    folder.mkdir(exist_ok=True)
    sampling = SamplingConfig(
        num_samples=SAMPLES,
        temperature=1.0,
        max_completion_length=config.max_length // 2,
        batch_size=8,
        seed=config.seed,
    )
    table = []
    for name, path in {"before": start, "after": merged}.items():
        release_memory()  # of the model before
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
            boxed=False,
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
    write_json(report, table)
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

    Under torchrun every process calls this, and the first one reports.

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
        ValueError: see `rlvr` and `rl_corpus`; or the run does not fit the card, with what to
            change.
    """
    _show_log()
    if isinstance(algorithm, str):
        algorithm = get_algorithm(algorithm)
    point = starting_point(start, settings.get("reference", "sft"))
    if point.preset.name == EMBEDDED:
        settle_process()
    gib = memory_of_card(memory)
    of_algorithm = {name: getattr(algorithm, name) for name in SETTINGS}
    changes = (SMOKE["rlvr"] if smoke else {}) | of_algorithm | settings
    config = rlvr_config(point.preset, gib, recorded_settings(out, "rlvr"), **changes)
    setup = setup_of(point.preset, config, gib)
    print(f"{algorithm.name} from {start} -> {out}\n{algorithm.description}\n")
    if point.preset.name != EMBEDDED:
        print(f"{memory_report(setup, point.preset.name, gib)}\n")
    if gib is not None:
        check_fits(setup, gib)
    load_unsloth(standby=setup.use_vllm and has_gpu())
    corpus = rl_corpus(
        load_tokenizer(point.model),
        config.max_prompt_length,
        data=data or _data(point.preset, path, "dapo"),
        path=path,
        limit=limit,
    )
    show_table(corpus.table())
    print(f"\n{run_report(setup, config.max_steps, len(corpus.rows))}\n")
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
    if rank() > 0:
        return metrics
    note = f"{point.preset.name}, seed {config.seed}; thin: each step, thick: moving average"
    plot_training({algorithm.name: metrics}, Path(out) / "training.png", note)
    before = Path(out) / REPORT
    if before.is_file():
        print("\nPreflight, before the first step:")
        found = json.loads(before.read_text(encoding="utf-8"))
        show_table([{name: f"{found[name]:.3f}" for name in SHARES}])
    print("\nTraining:")
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
    return (
        f"python -m sage_unsloth evaluate --models start={before} {name}={after} --benchmarks "
        f"{benchmark}"
    )


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
    """First and last tenth of a run, averaged, as rows of a table; a metric that was not logged is
    left out.
    """
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


def _show_log() -> None:
    """What the package logs (the preflight, a fall back, the pace) belongs on the screen, where
    nobody set up logging.
    """
    log_to_terminal()
    logging.getLogger("sage_unsloth").setLevel(logging.INFO)


def _data(preset: ModelPreset, path: str | Path | None, default: str) -> str:
    return "arithmetic" if preset.name == EMBEDDED and path is None else default
