"""The report of a grid: each cell beside plain GRPO with the same seeds, and the noise of seeds.

Shapes: S seeds, P problems.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.analysis.figures import plot_heat_maps
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.evaluation.metrics import (
    difference_curve,
    mean_and_deviation,
    pass_at_k_curve,
)
from sage_unsloth.lab.evidence.power import student_quantile
from sage_unsloth.lab.grid_design import GridConfig, cell_folder, floor_folder


def make_report(
    config: GridConfig,
    rows: Sequence[dict],
    counts: Mapping[str, np.ndarray],
    routes: Mapping[str, float],
) -> dict[str, Any]:
    """Each cell beside plain GRPO with the same seeds, and how far GRPO's own seeds are apart.

    Args:
        config: of the grid.
        rows: the problems.
        counts: folder -> correct samples of each problem, (P,).
        routes: folder -> share of completions that take the rare way.
    """
    k = min(16, config.run.sampling.num_samples)
    everything = np.ones(len(rows), bool)
    rare = np.array([row["family"] == "rare" for row in rows])
    columns = {"pass@1": (1, everything), f"pass@{k}": (k, everything)}
    if rare.any():
        columns[f"pass@{k} of rare problems"] = (k, rare)
    cells = [
        _cell(config, threshold, ratio, columns, counts, routes)
        for threshold, ratio in config.cells()
    ]
    return {
        "k": k,
        "seeds": len(config.seeds),
        "floor": _floor(config, columns, counts, routes),
        "cells": cells,
        "table": [_row(cell) for cell in cells],
        "num_problems": len(rows),
    }


def _floor(
    config: GridConfig,
    columns: Mapping[str, tuple[int, np.ndarray]],
    counts: Mapping[str, np.ndarray],
    routes: Mapping[str, float],
) -> dict[str, Any]:
    """Plain GRPO: every seed's value, their mean and deviation (None for one seed)."""
    n = config.run.sampling.num_samples
    names = [floor_folder(seed) for seed in config.floor_seeds]
    floor: dict[str, Any] = {}
    for title, (k, chosen) in columns.items():
        values = [pass_at_k_curve(n, counts[name][chosen], [k])[k].mean for name in names]
        mean, deviation = mean_and_deviation(values) if len(values) > 1 else (values[0], None)
        floor[title] = {"values": values, "mean": mean, "deviation": deviation}
    shares = [routes[name] for name in names]
    floor["rare_way"] = {"values": shares, "mean": float(np.mean(shares))}
    return floor


def _cell(
    config: GridConfig,
    threshold: float,
    ratio: float,
    columns: Mapping[str, tuple[int, np.ndarray]],
    counts: Mapping[str, np.ndarray],
    routes: Mapping[str, float],
) -> dict[str, Any]:
    """A cell's values, and its differences to plain GRPO with the same seeds."""
    n = config.run.sampling.num_samples
    names = [cell_folder(threshold, ratio, seed) for seed in config.seeds]
    own = np.stack([counts[name] for name in names])
    plain = np.stack([counts[floor_folder(seed)] for seed in config.seeds])
    values, differences = {}, {}
    for title, (k, chosen) in columns.items():
        values[title] = vars(pass_at_k_curve(n, own[:, chosen], [k])[k])
        found = difference_curve(n, own[:, chosen], n, plain[:, chosen], [k])[k]
        differences[title] = vars(found)
    return {
        "threshold": threshold,
        "ratio": ratio,
        "values": values,
        "differences": differences,
        "rare_way": float(np.mean([routes[name] for name in names])),
    }


def _row(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as a row of `table.csv`."""
    row = {"threshold": cell["threshold"], "ratio": cell["ratio"]}
    for title, found in cell["differences"].items():
        row |= {
            title: cell["values"][title]["mean"],
            f"{title}_difference": found["mean"],
            f"{title}_low": found["low"],
            f"{title}_high": found["high"],
        }
    return row | {"rare_way": cell["rare_way"]}


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
        f"{run['sampling']['num_samples']} samples, {run['rlvr']['max_steps']} steps, "
        f"{seeds} seed{'s' * (seeds > 1)} a cell; [ ]: 95 % over problems; bold: it leaves out 0, "
        "and the difference exceeds the noise"
    )
    floors = {title: floor_text(result["floor"][title]) for title in titles}
    noise = {title: noise_of(result["floor"][title], seeds) for title in titles}
    plot_heat_maps(panels, floors, noise, out / "grid.png", note)


def noise_of(floor: dict[str, Any], seeds: int) -> float | None:
    """The largest difference of two means of S seeds of plain GRPO, 19 times in 20.

    It is t √(2/S) times the deviation of one seed; t is Student's quantile for the number of seeds
    that the deviation comes from (4.30 for three). None where there is one seed, or where the seeds
    agree exactly, which says that there are too few of them.
    """
    if not floor["deviation"]:
        return None
    t = student_quantile(0.975, len(floor["values"]) - 1)
    return t * (2 / seeds) ** 0.5 * floor["deviation"]


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
        "[ ]: 95 % over problems (and seeds, where a cell has several), for these trained models. "
        "Two means of as many seeds",
        "of plain GRPO differ by this much or less 19 times in 20, as far as its seeds here can "
        "tell: " + ", ".join(noise) + ".",
        "A smaller difference is not shown to be the guide's doing, and of "
        f"{len(result['cells'])} cells the best one is the luckiest too.",
    ]
    return "\n".join(lines)
