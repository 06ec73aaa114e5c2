"""What Branch could do on a variant, from the SFT model's samples, before anything is trained.

    python -m research.variants.dose --runs runs/variants --variants skewed fork fork-twin

Writes `dose.json` beside the records: the dose of the guide of `sage-branch-exact` on the first
samples of each test problem, and the β from which it could change which solutions survive.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from research.variants.design import RESULTS, SFT, load_variant
from sage_unsloth.models.embedded import settle_process
from sage_unsloth.runs.files import read_json, read_jsonl, write_json
from sage_unsloth.training.algorithms import get_algorithm
from sage_unsloth.training.guide_dose import guide_dose

DOSES = RESULTS / "dose.json"
GUIDED = "sage-branch-exact"
SAMPLES = 3  # of each problem


def measure_variant(runs: Path, name: str) -> dict[str, Any]:
    """The dose on the SFT model's samples of the test problems."""
    from sage_unsloth.analysis.perplexity import load_scorer

    variant, row = load_variant(name), get_algorithm(GUIDED)
    assert row.guide is not None
    folder = runs / variant.start
    samples = read_jsonl(folder / "samples" / f"{SFT}.test.jsonl")
    model, tokenizer = load_scorer(folder / "sft" / "model")
    dose = guide_dose(
        [record for record in samples if record["sample"] < SAMPLES],
        row.guide,
        model,
        tokenizer,
        variant.task.benchmarks[0].rows,
        scale_rewards=row.scale_rewards,
    )
    return asdict(dose) | {"samples": SAMPLES, "needed_beta": dose.needed_beta()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of models and runs")
    parser.add_argument("--variants", nargs="+", default=["skewed"])
    options = parser.parse_args(arguments)
    settle_process()
    doses = read_json(DOSES) if DOSES.exists() else {}
    for name in options.variants:
        doses[name] = measure_variant(options.runs, name)
    write_json(DOSES, doses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
