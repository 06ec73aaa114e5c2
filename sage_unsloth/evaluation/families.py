"""The report of the embedded task: pass@k of all problems and by family, and solution methods.

Every family is a benchmark for `report_sets`, so intervals and paired differences are those of
`compare`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.problems import arithmetic

LOGGED = ("reward", "kl", "kl/ref_k3", "sage/entropy", "sage/guide_mean", "sage/share_touched",
          "grad_norm")  # fmt: skip
FAMILY_ORDER = ("rare", "usual", "both", "far")


def family_report(
    rows: Sequence[dict],
    samples: Mapping[str, Sequence[dict]],
    sampling: dict[str, Any],
    folder: str | Path,
) -> dict[str, Any]:
    """pass@k of every model with differences, for all problems and by family, and solution methods.

    Args:
        rows: the problems, with `id` and `family`.
        samples: model -> records of N samples of every problem; the first is compared against.
        folder: gets the tables and figures of `report_sets`.

    Returns:
        `num_problems`, `pass_at_k` and `differences` (at k = 1 and N) by title, and `behaviour`.
    """
    from sage_unsloth.evaluation.record_tables import record_set
    from sage_unsloth.evaluation.report import report_sets

    families = [name for name in FAMILY_ORDER if name in {row["family"] for row in rows}]
    groups = {"all problems": {row["id"] for row in rows}} | {
        f"family: {name}": {row["id"] for row in rows if row["family"] == name} for name in families
    }
    result = report_sets(
        [
            record_set([r for r in records if r["problem_id"] in chosen], name, title, sampling)
            for title, chosen in groups.items()
            for name, records in samples.items()
        ],
        folder,
    )
    return {
        "num_problems": {title: len(chosen) for title, chosen in groups.items()},
        "pass_at_k": result["pass_at_k"],
        "differences": {
            title: {
                pair: {
                    k: curve[k] for k in dict.fromkeys((min(curve, key=int), max(curve, key=int)))
                }
                for pair, curve in pairs.items()
            }
            for title, pairs in result["differences"].items()
        },
        "behaviour": {name: _behaviour(records) for name, records in samples.items()},
    }


def _behaviour(records: Sequence[dict]) -> dict[str, Any]:
    routes = Counter(arithmetic.route(record["completion"]) for record in records)
    grades = Counter(record["grade"] for record in records)
    total = len(records)
    return {
        "completions": total,
        "grades": dict(sorted(grades.items())),
        "in_format": sum(record["extracted"] is not None for record in records) / total,
        "finished": sum(record["finish_reason"] == "stop" for record in records) / total,
        "mean_tokens": sum(record["num_tokens"] for record in records) / total,
        "routes": {route: count / total for route, count in routes.most_common()},
    }


def first_and_last_tenth(log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of the first and the last tenth of a training log; guide metrics only with a guide."""
    import numpy as np

    tenth = max(1, len(log) // 10)
    columns = [name for name in LOGGED if name in log[0]]
    return {"steps": len(log)} | {
        part: {name: float(np.mean([row[name] for row in rows])) for name in columns}
        for part, rows in (("first_tenth", log[:tenth]), ("last_tenth", log[-tenth:]))
    }


def family_tables(report: Mapping[str, Any]) -> str:
    """The report as tables for a terminal, with notes on reading them."""
    lines = []
    for title, table in report["pass_at_k"].items():
        ks = list(next(iter(table.values())))
        shown = list(dict.fromkeys((ks[0], ks[len(ks) // 2], ks[-1])))
        lines.append(f"{title} ({report['num_problems'][title]})")
        lines.append(_line("", [f"pass@{k}" for k in shown], 22))
        for name, curve in table.items():
            lines.append(_line(name, [_cell(curve[k]) for k in shown], 22))
        for pair, result in report["differences"][title].items():
            cells = (f"pass@{k} {_cell(difference, '+')}" for k, difference in result.items())
            lines.append(f"  {pair}: " + ", ".join(cells))
        lines.append("")
    ways = list(arithmetic.ROUTES)
    lines.append("ways of working, share of completions")
    lines.append(_line("", [*ways, "in format"], 10))
    for name, behaviour in report["behaviour"].items():
        shares = [behaviour["routes"].get(way, 0.0) for way in ways] + [behaviour["in_format"]]
        lines.append(_line(name, [f"{share:.3f}" for share in shares], 10))
    lines += [
        "",
        "Intervals: 95 %, over problems, paired for differences. Each method was "
        "trained with one seed,",
        "so another seed may give another difference between methods.",
    ]
    return "\n".join(lines)


def _line(name: str, cells: Sequence[str], width: int) -> str:
    return ("  " + f"{name:<13}" + "".join(f"{cell:<{width}}" for cell in cells)).rstrip()


def _cell(result: Mapping[str, float], sign: str = "") -> str:
    mean, low, high = (f"{result[name]:{sign}.3f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
