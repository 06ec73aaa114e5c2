"""The work of one process of a study: train and evaluate a run, or evaluate a model.

Each function writes one file in `results/`, complete or absent, and can be called again after a
kill at any moment.
"""

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from sage_unsloth.evaluation.evaluator import choose_engine, sample_models
from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.evaluation.record_tables import RecordSet
from sage_unsloth.models.device import frees_models, release_memory
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.trained import trained_in_4bit
from sage_unsloth.runs.files import read_json, whole_folder, write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.runs.text import file_name
from sage_unsloth.sampling.record_files import read_set
from sage_unsloth.study.plan import EARLY, SCALE, SERIES, variant_name
from sage_unsloth.study.points import START, Point
from sage_unsloth.study.tasks import Task
from sage_unsloth.training.guide_dose import guide_dose
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft
from sage_unsloth.training.stage import read_metrics

SCORED = 400
"""Most completions of the start model for the dose of a guide."""

logger = logging.getLogger(__name__)


def prepare_start(task: Task, out: Path) -> None:
    """Runs the task's SFT in `out/sft`."""
    assert task.sft is not None
    sft(task.sft, task.model, list(task.sft_rows), out / "sft")


def start_model(task: Task, out: Path) -> tuple[str, str | None]:
    """The model that RL starts from, and its adapter."""
    return (task.model, task.adapter) if task.sft is None else (str(out / "sft" / "model"), None)


@frees_models
def train_run(
    task: Task, out: Path, point: Point, seed: int, result: Path, early: Sequence[int] = ()
) -> None:
    """Trains a run in `out/runs/NAME` as `train` does, evaluates it, and writes its result.

    Args:
        task, out: of the study.
        point, seed: of the run.
        result: the file to write.
        early: steps after which the adapter is copied to `early/STEP` in the run's folder.
    """
    name = result.stem
    config, guide = point.configure(task.rlvr, task.common)
    model, adapter = start_model(task, out)
    folder = out / "runs" / name
    trained = rlvr(
        replace(config, seed=seed),
        model,
        list(task.rows),
        folder,
        guide,
        name,
        adapter=adapter,
        callbacks=[CopiesAdapter(folder, early)] if early else [],
        force=task.smoke,
        verifier=task.verifier,
        rewards=task.rewards,
        data=task.data,
    )
    steps = read_metrics(folder)
    # Not the clock's: a resumed run was trained by several processes.
    seconds = {"train": sum(row["seconds"] for row in steps)}
    series = {
        column: [_round(row.get(source)) for row in steps] for column, source in SERIES.items()
    }
    release_memory()
    paths = (str(trained), None) if config.full_finetuning else (model, str(trained))
    sets, seconds["evaluate"] = sample_model(task, out, name, *paths)
    write_json(
        result,
        {
            "point": point.name,
            "algorithm": point.algorithm,
            "settings": dict(point.settings),
            "seed": seed,
            "sets": sets,
            "training": series,
            "seconds": seconds,
            "environment": environment(),
        },
    )


@frees_models
def sample_start(task: Task, out: Path, num_samples: int, result: Path) -> None:
    """Evaluates the model that every run starts from.

    `later` counts the samples that the trained models do not have; see `study.chord`.
    """
    first = task.sampling.num_samples
    task = replace(task, sampling=replace(task.sampling, num_samples=num_samples))
    sets, seconds = sample_model(task, out, result.stem, *start_model(task, out), later=first)
    write_json(
        result,
        {
            "point": result.stem,
            "seed": None,
            "sets": sets,
            "seconds": {"evaluate": seconds},
            "environment": environment(),
        },
    )


@frees_models
def sample_variants(
    task: Task,
    out: Path,
    run: str,
    seed: int,
    variants: Sequence[tuple[str, float]],
    result: Path,
) -> None:
    """Evaluates variants of a trained run that need no training.

    Args:
        task, out: of the study.
        run: name of the trained run.
        seed: of its training.
        variants: (kind, value): EARLY, after `value` steps; SCALE, the LoRA times `value`;
            TEMPERATURE, at `value`.
        result: the file to write.
    """
    model, _ = start_model(task, out)
    folder, rows, total = out / "runs" / run, [], 0.0
    for kind, value in variants:
        adapter, requested = folder / "adapter", task
        if kind == EARLY:
            adapter = folder / EARLY / f"{value:g}"
        elif kind == SCALE:
            adapter = scale_adapter(adapter, value, folder / "scaled" / f"{value:g}")
        else:
            requested = replace(task, sampling=replace(task.sampling, temperature=value))
        release_memory()
        name = variant_name(run, kind, value)
        sets, seconds = sample_model(requested, out, name, model, str(adapter))
        rows.append({"run": run, "seed": seed, "kind": kind, "value": value, "sets": sets})
        total += seconds
    record = {"variants": rows, "seconds": {"evaluate": total}, "environment": environment()}
    write_json(result, record)


@frees_models
def measure_guide(task: Task, out: Path, point: Point, result: Path) -> None:
    """Measures the dose of a guide on the start model's completions of the first benchmark."""
    config, guide = point.configure(task.rlvr, task.common)
    assert guide is not None
    benchmark = task.benchmarks[0]
    (file,) = (out / "evaluation" / START / "samples" / file_name(benchmark.name)).glob("*.jsonl")
    records = sorted(read_set(file)[1], key=lambda record: record["sample"])[:SCORED]
    path, adapter = start_model(task, out)
    model, tokenizer = load_policy(
        path,
        adapter=adapter,
        load_in_4bit=adapter is not None and trained_in_4bit(adapter),
        template=task.template,
        prompt=task.prompt,
    )
    dose = guide_dose(
        records,
        guide,
        model.eval(),
        tokenizer,
        benchmark.rows,
        temperature=config.temperature,
        max_steps=config.max_steps,
        scale_rewards=config.scale_rewards,
    )
    row = {"point": point.name, "completions": len(records)} | asdict(dose)
    write_json(result, row | {"environment": environment()})


def scale_adapter(adapter: Path, scale: float, folder: Path) -> Path:
    """Copies a LoRA adapter with `scale` times its change of the weights."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with whole_folder(folder) as partial:
        shutil.copytree(adapter, partial, dirs_exist_ok=True)
        config = read_json(partial / "adapter_config.json")
        # The change of a weight is lora_alpha / r (or / √r) times B A.
        config["lora_alpha"] = config["lora_alpha"] * scale
        write_json(partial / "adapter_config.json", config)
    return folder


class CopiesAdapter(TrainerCallback):
    """Copies the adapter after some steps, without an effect on training."""

    def __init__(self, folder: Path, steps: Sequence[int]):
        self.folder, self.steps = folder, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = self.folder / EARLY / str(state.global_step)
        if state.global_step in self.steps and not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            with whole_folder(folder) as partial:
                kwargs["model"].save_pretrained(partial)


def sample_model(
    task: Task, out: Path, name: str, model: str, adapter: str | None, later: int = 0
) -> tuple[dict[str, Any], float]:
    """Samples a model on every benchmark as `evaluate` does; returns its counts and the seconds.

    With `later` the samples from this number on are counted apart as well.
    """
    began = time.perf_counter()
    completions = task.num_problems * task.sampling.num_samples
    logger.info("Evaluates %s: %s completions.", name, f"{completions:,}")
    spec = ModelSpec(
        name=name,
        path=model,
        adapter=adapter,
        template=task.template,
        prompt=task.prompt,
        load_in_4bit=adapter is not None and trained_in_4bit(adapter),
    )
    sets = sample_models(
        [spec],
        task.benchmarks,
        out / "evaluation" / name,
        task.sampling,
        engine=choose_engine(load_in_4bit=spec.load_in_4bit),
        show=logger.debug,
    )
    counts = {}
    for benchmark, record_set in zip(task.benchmarks, sets, strict=True):
        counts[benchmark.name] = count_correct(record_set, benchmark.rows)
        if later:
            apart = replace(record_set, correct=record_set.correct[:, later:])
            row = count_correct(apart, benchmark.rows)
            counts[benchmark.name]["later"] = {n: row[n] for n in ("num_samples", "correct")}
    return counts, time.perf_counter() - began


def count_correct(record_set: RecordSet, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Correct completions of each problem, in the order of the rows, and the mean length."""
    by_problem = dict(
        zip(record_set.problems, record_set.correct.sum(axis=1).tolist(), strict=True)
    )
    lengths = [record["num_tokens"] for record in record_set.records]
    return {
        "num_samples": record_set.correct.shape[1],
        "correct": [by_problem[row["id"]] for row in rows],
        "mean_tokens": _round(float(np.mean(lengths))),
    }


def _round(value: float | None) -> float | None:
    """Five significant digits, enough for these series."""
    return None if value is None else float(f"{value:.5g}")
