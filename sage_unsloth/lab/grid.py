"""The Branch guide's threshold × ratio (Table 6) on the embedded task, beside plain GRPO.

SFT runs once. Each cell is an RL run and an evaluation in its own folder,
`threshold-T_ratio-R_seed-S`; plain GRPO, which is a ratio of 0, is `grpo_seed-S`, and its seeds
show the noise. Stop it at any time: the same command resumes, and a larger grid takes the cells
that are there.
"""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.figures import write_table
from sage_unsloth.lab.grid_design import GridConfig, cell_folder, floor_folder
from sage_unsloth.lab.grid_report import draw, make_report, summary
from sage_unsloth.models.device import frees_models, release_memory
from sage_unsloth.models.embedded import BASE_MODEL, data_folder, settle_process
from sage_unsloth.models.loading import load_policy
from sage_unsloth.patch.loading import load_unsloth
from sage_unsloth.planning.plan import duration
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.subsets import over_families
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment, open_run
from sage_unsloth.sampling.counts import correct_matrix
from sage_unsloth.sampling.engines import TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.quickstart_plan import MEASURED_ON, SECONDS
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft


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
    from sage_unsloth.runs.progress import progress

    settings = asdict(config.run)
    del settings["rlvr"]["seed"]  # each run's own
    out = open_run(out, {"command": "grid"} | settings)
    runs = config.runs()
    print(plan(config, out))
    load_unsloth()
    settle_process()
    base = data_folder() / BASE_MODEL
    merged = sft(config.run.sft, base, arithmetic.problems("sft"), out / "sft")
    rows = over_families(arithmetic.problems("test"), config.run.num_problems)
    n = config.run.sampling.num_samples
    counts, routes = {}, {}
    with progress(total=len(runs), desc="grid", unit="run") as bar:
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
    first = config.seeds[0]
    pair = (floor_folder(first), cell_folder(best["threshold"], best["ratio"], first))
    paths = [str(out / name) for name in pair]
    paths += [str(out / "samples" / f"{name}.jsonl") for name in pair]
    words = ["analyze", *paths, "--out", str(out / "analysis"), "--page"]
    print(f"\nNext: python -m sage_unsloth {shlex.join(words)}")
    return result


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
    seconds = SECONDS
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
            f"{len(runs) - len(left)} of them trained; then {problems} problems x "
            f"{sampling.num_samples} samples each",
            f"Estimate: {duration(len(left) * each + seconds['start'])} "
            f"({MEASURED_ON}); the bars show this machine's own pace.",
            "Stop it whenever you like: the same command resumes from the last checkpoint.\n",
        ]
    )
