"""From the counts of a benchmark to its report: levels, paired differences, verdicts, training.

Shapes: S seeds, P problems, K values of k.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from research.benchmark.claims import CLAIMS, judge
from research.benchmark.records import BASELINE, SFT, Records
from sage_unsloth.study.crossed import components, crossed_interval
from sage_unsloth.study.plan import SERIES

# Differences that are reported beside those to grpo and to SFT.
PAIRS = (
    ("sage-branch-exact", "grpo-exact"),
    ("sage-token-exact", "grpo-exact"),
    ("bnpo-sage-branch", "bnpo-no-kl"),
    ("bnpo-sage-branch", "bnpo"),
    ("dapo-sage-branch", "dapo-no-kl"),
    ("dapo-sage-branch", "dapo"),
)


def make_report(data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that `report.json` holds, from what `records.json` holds."""
    records = Records(data)
    others = [name for name in records.algorithms if name not in (SFT, BASELINE)]
    pairs = [(name, BASELINE) for name in others]
    pairs += [(name, SFT) for name in records.algorithms if name != SFT]
    pairs += [pair for pair in PAIRS if set(pair) <= set(records.algorithms)]
    table: dict[str, Any] = {"pass_at_k": {}, "differences": {}}
    for name in data["sets"]:
        cells, differences = {}, {}
        for group, chosen in records.groups(name).items():
            values = {
                (algorithm, k): records.pass_at_k(records.of(algorithm), name, k)[:, chosen]
                for algorithm in records.algorithms
                for k in records.ks(name)
            }
            cells[group] = {
                algorithm: {
                    str(k): level(values[algorithm, k], algorithm == SFT) for k in records.ks(name)
                }
                for algorithm in records.algorithms
            }
            differences[group] = {
                f"{a} - {b}": {
                    str(k): interval(values[a, k] - values[b, k]) for k in records.ks(name)
                }
                for a, b in pairs
            }
        table["pass_at_k"][name], table["differences"][name] = cells, differences
    claims = [judge(claim, records) for claim in CLAIMS]
    return {
        "task": data["task"],
        "title": data["title"],
        "seeds": records.seeds,
        "algorithms": records.algorithms,
        "num_problems": {name: len(item["problems"]) for name, item in data["sets"].items()},
        "num_samples": {name: item["num_samples"] for name, item in data["sets"].items()},
        "settings": data["settings"],
        "environment": data["environment"],
        **table,
        "claims": [claim for claim in claims if claim is not None],
        "not_run": sorted(
            {name for claim in CLAIMS for name in (claim.a, claim.b)} - set(records.algorithms)
        ),
        "behaviour": _behaviour(records),
        "training": _training(records),
        "components": _components(records, pairs),
    }


def interval(values_SP: np.ndarray, once: bool = False) -> dict[str, float]:
    """Mean and interval as a dict; `once`: the rows are one and the same model."""
    values_SP = values_SP[:1] if once else values_SP
    if values_SP.size < 2:
        mean = float(values_SP.mean())
        return {"mean": mean, "low": mean, "high": mean}
    result = crossed_interval(values_SP)
    return {name: getattr(result, name) for name in ("mean", "low", "high")}


def level(values_SP: np.ndarray, once: bool) -> dict[str, float]:
    """`interval` of shares, which lie in [0, 1]."""
    result = interval(values_SP, once)
    return {name: min(1.0, max(0.0, value)) for name, value in result.items()}


def _behaviour(records: Records) -> dict[str, Any]:
    """The rare way among all and among the correct completions, format and length, on the test."""
    result = {}
    for name in records.algorithms:
        tests = [run["sets"]["test"] for run in records.of(name)]
        row: dict[str, Any] = {
            key: float(np.mean([test[key] for test in tests]))
            for key in ("in_format", "mean_tokens")
        }
        if records.data["rare_route"] is not None:
            row["rare way"] = level(records.route_share(name), name == SFT)
            row["solutions by the rare way"] = level(
                records.solutions_by_rare_way(name), name == SFT
            )
        result[name] = row
    return result


def _training(records: Records) -> dict[str, Any]:
    """Mean over seeds of each series in the first, middle and last third of training."""
    result: dict[str, Any] = {}
    for name in records.algorithms:
        for column in SERIES:
            thirds = [records.third(name, column, number) for number in range(3)]
            results = [interval(third) for third in thirds if third is not None]
            if len(results) == len(thirds):
                result.setdefault(name, {})[column] = results
    return result


def _components(records: Records, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Variance components of the differences to grpo; {} for a single seed."""
    if len(records.seeds) < 2:
        return {}
    result: dict[str, Any] = {}
    for a, b in pairs:
        if b != BASELINE:
            continue
        for k in records.ks("test"):
            values = [records.pass_at_k(records.of(name), "test", k) for name in (a, b)]
            if values[0].shape[1] > 1:
                result.setdefault(f"{a} - {b}", {})[f"pass@{k}"] = asdict(
                    components(values[0] - values[1])
                )
    return result
