"""The Branch guide's hyperparameters on the embedded task: threshold × ratio (Table 6), beside
plain GRPO as the noise floor.

SFT runs once. Each cell is an RL run and an evaluation in its own folder,
`threshold-T_ratio-R_seed-S`; plain GRPO, which is a ratio of 0, is `grpo_seed-S`. What a difference
means stands beside it: an interval over problems, and how far GRPO's own seeds are apart. Stop it
at any time: the same command goes on, and a larger grid takes the cells that are there.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth import quickstart
from sage_unsloth.analysis.figures import plot_heat_maps
from sage_unsloth.evaluation.metrics import (
    Estimate,
    difference_curve,
    mean_and_deviation,
    pass_at_k_curve,
)
from sage_unsloth.figures import write_table
from sage_unsloth.lab.evidence.power import student_quantile
from sage_unsloth.models.device import frees_models, release_memory
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.models.loading import load_policy
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.loading import load_unsloth
from sage_unsloth.planning.plan import duration
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment, open_run
from sage_unsloth.sampling.counts import correct_matrix
from sage_unsloth.sampling.engines import TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft

THRESHOLDS = (0.8, 1.2, 2.0)
RATIOS = (0.1, 0.3, 0.5)


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """What is trained.

    Attributes:
        thresholds: of the Branch guide, nats.
        ratios: per nat, > 0; plain GRPO runs beside them.
        seeds: training seeds of every cell.
        floor_seeds: training seeds of plain GRPO, those of the cells first; two or more show the
            noise.
        run: settings of SFT, RL and evaluation, as in the quickstart; the RL seed is the cell's.

    Raises:
        ValueError: no cells, one named twice, a ratio that is not > 0, or GRPO without one of the
            cells' seeds.
    """

    thresholds: tuple[float, ...] = THRESHOLDS
    ratios: tuple[float, ...] = RATIOS
    seeds: tuple[int, ...] = (3407,)
    floor_seeds: tuple[int, ...] = (3407, 3408, 3409)
    run: quickstart.QuickstartConfig

    def __post_init__(self) -> None:
        for name in ("thresholds", "ratios", "seeds", "floor_seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different values, at least one; got {values}")
        if min(self.ratios) <= 0:
            raise ValueError(
                f"ratios must be > 0, since a ratio of 0 is plain GRPO and always runs; got "
                f"{self.ratios}"
            )
        if not set(self.seeds) <= set(self.floor_seeds):
            raise ValueError(
                f"plain GRPO must run with every seed of the cells, because they are compared; "
                f"got seeds={self.seeds} and "
                f"floor_seeds={self.floor_seeds}"
            )
        for threshold, ratio in self.cells():
            BranchGuide(threshold=threshold, ratio=ratio)  # checks both

    def cells(self) -> list[tuple[float, float]]:
        return [(threshold, ratio) for threshold in self.thresholds for ratio in self.ratios]

    def runs(self) -> dict[str, tuple[BranchGuide, int]]:
        """Folder -> guide and seed, plain GRPO first."""
        runs = {floor_folder(seed): (BranchGuide(ratio=0.0), seed) for seed in self.floor_seeds}
        for seed in self.seeds:
            for threshold, ratio in self.cells():
                guide = BranchGuide(threshold=threshold, ratio=ratio)
                runs[cell_folder(threshold, ratio, seed)] = (guide, seed)
        return runs


def cell_folder(threshold: float, ratio: float, seed: int) -> str:
    return f"threshold-{threshold:g}_ratio-{ratio:g}_seed-{seed}"


def floor_folder(seed: int) -> str:
    return f"grpo_seed-{seed}"


@frees_models
def grid(out: str | Path, config: GridConfig) -> dict[str, Any]:
    """Run or resume the grid in the folder `out`, print its table, and return what `grid.json`
    holds.

    Leaves `grid.json`, `table.csv`, `grid.png` (the two heat maps; `grid.csv` beside it),
    `samples/`, and a folder for each run.

    Raises:
        ValueError: the folder holds runs with other settings, or another process writes to it.
    """
    with locked(out):
        return _grid(out, config)


def _grid(out: str | Path, config: GridConfig) -> dict[str, Any]:
    """`grid` once the folder is this process's own."""
    from tqdm.auto import tqdm

    settings = asdict(config.run)
    del settings["rlvr"]["seed"]  # each run's own
    out = open_run(out, {"command": "grid"} | settings)
    runs = config.runs()
    print(plan(config, out))
    load_unsloth()
    quickstart.settle_process()
    base = data_folder() / quickstart.BASE_MODEL
    merged = sft(config.run.sft, base, arithmetic.problems("sft"), out / "sft")
    rows = quickstart.spread(arithmetic.problems("test"), config.run.num_problems)
    n = config.run.sampling.num_samples
    counts, routes = {}, {}
    with tqdm(total=len(runs), desc="grid", unit="run") as bar:
        for name, (guide, seed) in runs.items():
            bar.set_postfix_str(name)
            settings = replace(config.run.rlvr, seed=seed)
            problems = arithmetic.problems("train")
            adapter = rlvr(settings, merged, problems, out / name, guide, name)
            records = _evaluate(config, merged, adapter, rows, out / "samples" / f"{name}.jsonl")
            counts[name] = correct_matrix(records, [row["id"] for row in rows], n).sum(axis=1)
            routes[name] = float(
                np.mean([arithmetic.route(r["completion"]) == "round-up" for r in records])
            )
            bar.update()
    result = make_report(config, rows, counts, routes)
    result |= {"settings": asdict(config), "environment": environment()}
    write_json(out / "grid.json", result)
    write_table(out / "table.csv", result["table"])
    draw(result, out)
    print(f"\n{summary(result)}\n\nWritten to {out}: grid.json, table.csv, grid.png, samples/")
    best = max(result["cells"], key=lambda cell: cell["differences"][f"pass@{result['k']}"]["mean"])
    pair = (
        floor_folder(config.seeds[0]),
        cell_folder(best["threshold"], best["ratio"], config.seeds[0]),
    )
    paths = [str(out / name) for name in pair]
    paths += [str(out / "samples" / f"{name}.jsonl") for name in pair]
    words = ["analyze", *paths, "--out", str(out / "analysis"), "--page"]
    print(f"\nNext: python -m sage_unsloth {shlex.join(words)}")
    return result


def draw(result: dict[str, Any], out: Path) -> None:
    """The two heat maps of a `grid.json`, as `grid.png`."""
    titles, settings = ("pass@1", f"pass@{result['k']}"), result["settings"]
    panels = {
        title: {
            (cell["threshold"], cell["ratio"]): Estimate(
                *(cell["differences"][title][name] for name in ("mean", "low", "high"))
            )
            for cell in result["cells"]
        }
        for title in titles
    }
    run, seeds = settings["run"], len(settings["seeds"])
    note = (
        f"embedded arithmetic, {result['num_problems']} problems x "
        f"{run['sampling']['num_samples']} samples, "
        f"{run['rlvr']['max_steps']} steps, {seeds} seed{'s' * (seeds > 1)} a cell; [ ]: 95 % "
        f"over problems; "
        "bold: it leaves out 0, and the difference exceeds the noise"
    )
    floors = {title: floor_text(result["floor"][title]) for title in titles}
    noise = {title: noise_of(result["floor"][title], seeds) for title in titles}
    plot_heat_maps(panels, floors, noise, out / "grid.png", note)


def noise_of(floor: dict[str, Any], seeds: int) -> float | None:
    """What two means of S seeds of plain GRPO differ by 19 times in 20: t √(2/S) times the
    deviation of one seed.

    t is Student's quantile for the number of seeds that the deviation comes from (4.30 for three).
    None where there is one seed, or where the seeds agree exactly, which says that there are too
    few of them.
    """
    if not floor["deviation"]:
        return None
    t = student_quantile(0.975, len(floor["values"]) - 1)
    return t * (2 / seeds) ** 0.5 * floor["deviation"]


def _evaluate(
    config: GridConfig, merged: Path, adapter: Path, rows: list[dict], path: Path
) -> list[dict]:
    path.parent.mkdir(exist_ok=True)
    release_memory()  # of the model before
    engine = TransformersEngine(*load_policy(merged, adapter=adapter))
    sampling = config.run.sampling
    return sample_and_grade(sampling, engine, rows, path, model=path.stem, benchmark="arithmetic")


def plan(config: GridConfig, out: Path) -> str:
    """What will be done and how long it should take, from the quickstart's measured times."""
    rl, sampling = config.run.rlvr, config.run.sampling
    runs = config.runs()
    left = [name for name in runs if not (out / name / "adapter").is_dir()]
    completions = rl.completions_per_step
    problems = config.run.num_problems or len(arithmetic.problems("test"))
    seconds = quickstart.SECONDS
    each = rl.max_steps * completions * seconds["rollout"]
    each += problems * sampling.num_samples * seconds["sample"]
    return "\n".join(
        [
            f"Grid -> {out}",
            f"  thresholds {', '.join(f'{t:g}' for t in config.thresholds)} x ratios "
            f"{', '.join(f'{r:g}' for r in config.ratios)} x seeds "
            f"{', '.join(map(str, config.seeds))}; plain GRPO with seeds "
            f"{', '.join(map(str, config.floor_seeds))}",
            f"  {len(runs)} runs of {rl.max_steps} steps x {completions} completions, "
            f"{len(runs) - len(left)} of them trained; "
            f"then {problems} problems x {sampling.num_samples} samples each",
            f"Estimate: {duration(len(left) * each + seconds['start'])} "
            f"({quickstart.MEASURED_ON}); "
            "the bars show this machine's own pace.",
            "Stop it whenever you like: the same command goes on from the last checkpoint.\n",
        ]
    )


def make_report(
    config: GridConfig,
    rows: Sequence[dict],
    counts: dict[str, np.ndarray],
    routes: dict[str, float],
) -> dict[str, Any]:
    """Each cell beside plain GRPO with the same seeds, and how far GRPO's own seeds are apart.

    Args:
        config: of the grid.
        rows: the problems.
        counts: folder -> correct samples of each problem, (P,).
        routes: folder -> share of completions that take the rare way.
    """
    n = config.run.sampling.num_samples
    k = min(16, n)
    titles = {"pass@1": 1, f"pass@{k}": k}
    rare = np.array([row["family"] == "rare" for row in rows])
    groups = {title: (kk, np.ones(len(rows), bool)) for title, kk in titles.items()}
    if rare.any():
        groups[f"pass@{k} of rare problems"] = (k, rare)
    floor_runs = [floor_folder(seed) for seed in config.floor_seeds]
    floor = {}
    for title, (kk, chosen) in groups.items():
        values = [
            pass_at_k_curve(n, counts[name][chosen], [kk], resamples=1)[kk].mean
            for name in floor_runs
        ]
        mean, deviation = mean_and_deviation(values) if len(values) > 1 else (values[0], None)
        floor[title] = {"values": values, "mean": mean, "deviation": deviation}
    cells, table = [], []
    for threshold, ratio in config.cells():
        names = [cell_folder(threshold, ratio, seed) for seed in config.seeds]
        against = np.stack([counts[floor_folder(seed)] for seed in config.seeds])
        own = np.stack([counts[name] for name in names])
        cell: dict[str, Any] = {
            "threshold": threshold,
            "ratio": ratio,
            "values": {},
            "differences": {},
        }
        row: dict[str, Any] = {"threshold": threshold, "ratio": ratio}
        for title, (kk, chosen) in groups.items():
            value = pass_at_k_curve(n, own[:, chosen], [kk])[kk]
            found = difference_curve(n, own[:, chosen], n, against[:, chosen], [kk])[kk]
            cell["values"][title], cell["differences"][title] = vars(value), vars(found)
            row |= {
                title: value.mean,
                f"{title}_difference": found.mean,
                f"{title}_low": found.low,
                f"{title}_high": found.high,
            }
        cell["rare_way"] = row["rare_way"] = float(np.mean([routes[name] for name in names]))
        cells.append(cell)
        table.append(row)
    floor["rare_way"] = {
        "values": [routes[name] for name in floor_runs],
        "mean": float(np.mean([routes[name] for name in floor_runs])),
    }
    return {
        "k": k,
        "seeds": len(config.seeds),
        "floor": floor,
        "cells": cells,
        "table": table,
        "num_problems": len(rows),
    }


def floor_text(floor: dict[str, Any]) -> str:
    """What plain GRPO reaches, and the spread of its seeds."""
    if floor["deviation"] is None:
        return f"plain GRPO {floor['mean']:.3f}, one seed: its noise is unknown"
    return (
        f"plain GRPO {floor['mean']:.3f} ± {floor['deviation']:.3f} ({len(floor['values'])} seeds)"
    )


def summary(result: dict[str, Any]) -> str:
    """The grid as text for a terminal, plain GRPO first, and how to read it."""
    titles = [title for title in result["floor"] if title != "rare_way"]
    lines = [f"{title}: {floor_text(result['floor'][title])}" for title in titles]
    header = ["threshold", "ratio", *titles, "rare way"]
    rows = [header]
    for cell in result["cells"]:
        found = cell["differences"]
        rows.append(
            [f"{cell['threshold']:g}", f"{cell['ratio']:g}"]
            + [
                f"{found[t]['mean']:+.3f} [{found[t]['low']:+.3f}, {found[t]['high']:+.3f}]"
                for t in titles
            ]
            + [f"{cell['rare_way']:.3f}"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    seeds = result["seeds"]
    found_noise = {title: noise_of(result["floor"][title], seeds) for title in titles}
    noise = [
        f"{title} " + ("unknown" if n is None else f"{n:.3f}") for title, n in found_noise.items()
    ]
    lines += ["", "Differences to plain GRPO with the same seeds:"]
    lines += [
        "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [
        "",
        "[ ]: 95 % over problems (and seeds, where a cell has several): it is about these "
        "trained models. Two means of as many seeds",
        "of plain GRPO differ by this much or less 19 times in 20, as far as its seeds here can "
        "tell: " + ", ".join(noise) + ".",
        f"A smaller difference is not shown to be the guide's doing, and of "
        f"{len(result['cells'])} cells the best one is the luckiest too.",
    ]
    return "\n".join(lines)
