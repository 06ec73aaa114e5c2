"""Many samples of the model that every run of a frontier starts from.

    python -m research.frontier.start_model --out runs/start-models

Every "− SFT" of a frontier shares one estimate of the SFT model's pass@k, from as few samples as a
trained model gets. This trains SFT again by the frontier's own settings (seconds for the embedded
tasks), samples it `--samples` times a problem, and writes the counts to `start_model.json` in the
folder of the committed results. The seed of a sample depends on the problem and its number alone,
so the first samples must be those that `records.json` counts: the file says whether they are.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from research.benchmark.design import SFT
from research.data import DATA
from research.frontier.design import PROBLEMS, FrontierConfig
from research.frontier.records import START
from sage_unsloth.models.embedded import settle_process
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.sampling.counts import correct_matrix

SAMPLES = 512


def count_start_samples(
    samples: Sequence[dict], data: Mapping[str, Any], num_samples: int
) -> dict[str, Any]:
    """The correct samples of each problem, and whether the first are those of `records.json`.

    Args:
        samples: graded records of the SFT model.
        data: a frontier's `records.json`.
        num_samples: of each problem, at least as many as `data` has.

    Returns:
        `num_samples`; `correct`, in the order of the problems; `repeats`, of how many problems the
        first samples have the recorded count; `problems`, how many there are.
    """
    name, recorded_set = next(iter(data["sets"].items()))
    correct_PN = correct_matrix(samples, recorded_set["problems"], num_samples)
    start = next(run for run in data["runs"] if run["algorithm"] == SFT)
    first_P = correct_PN[:, : recorded_set["num_samples"]].sum(axis=1)
    equal_P = first_P == np.array(start["sets"][name]["correct"])
    return {
        "num_samples": num_samples,
        "correct": correct_PN.sum(axis=1).tolist(),
        "repeats": int(equal_P.sum()),
        "problems": len(equal_P),
    }


def sample_start_model(out: Path, config: FrontierConfig, num_samples: int) -> list[dict]:
    """Train SFT as the frontier does, in the folder `out`, and sample the result; resumable."""
    from sage_unsloth.models.loading import load_policy
    from sage_unsloth.sampling.engines import TransformersEngine
    from sage_unsloth.sampling.record_sets import sample_and_grade
    from sage_unsloth.trainers.loading import load_unsloth
    from sage_unsloth.training.sft_stage import sft

    task = config.load_task()
    load_unsloth()
    settle_process()
    if not (out / "sft" / "model").is_dir():
        sft(task.sft, task.prepare(out / "cache"), task.sft_rows, out / "sft")
    name, posed = next(iter(task.sets.items()))
    return sample_and_grade(
        replace(task.sampling, num_samples=num_samples),
        TransformersEngine(*load_policy(out / "sft" / "model")),
        posed.rows,
        out / f"{SFT}.{name}.jsonl",
        model=SFT,
        benchmark=f"{task.name}-{name}",
        checker=posed.checker,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["arithmetic", "countdown"])
    parser.add_argument("--problems", default="fresh", choices=PROBLEMS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each problem")
    parser.add_argument("--out", type=Path, required=True, help="for models and samples")
    options = parser.parse_args(arguments)
    code = environment()  # of the start: the checkout may have changed by the end
    for task in options.tasks:
        config = FrontierConfig(task=task, problems=options.problems)
        folder = DATA / "results" / "frontier" / task / options.problems
        data = read_json(folder / "records.json")
        samples = sample_start_model(options.out / task, config, options.samples)
        counts = count_start_samples(samples, data, options.samples)
        write_json(folder / START, counts | {"environment": code})
        print(f"{task}: {counts['repeats']} of {counts['problems']} problems repeat their count")
    return 0


if __name__ == "__main__":
    sys.exit(main())
