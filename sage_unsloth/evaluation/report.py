"""Reports on record sets: pass@k with intervals, paired differences, coverage, as tables and
figures.

`report` leaves `report.json`, `table.csv`, `pass_at_k.png` and `differences.png` (a CSV beside
each), `coverage.csv`.

Shapes: P problems, N samples per problem, S training seeds of one method.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.evaluation.figures import plot_differences, plot_pass_at_k
from sage_unsloth.evaluation.metrics import (
    difference_curve,
    mean_and_deviation,
    pass_at_k,
    pass_at_k_curve,
    solved_only_by,
)
from sage_unsloth.evaluation.record_tables import (
    BLOCKS,
    RecordSet,
    counts_of,
    read_sets,
    record_set,
    sets_below,
)
from sage_unsloth.figures import write_table
from sage_unsloth.grading.checker import Grade
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment

MUCH_CUT = 0.1  # share of completions that reached the length limit


def compare(
    paths: Sequence[str | Path], out: str | Path, against: str | None = None
) -> dict[str, Any]:
    """Report on record sets, wherever they are from; sets of one model on one benchmark are its
    training seeds.

    Args:
        paths: .jsonl files of record sets, or folders to look for them in.
        out: folder of the report.
        against: the model that the others are compared with; None takes the first.

    Raises:
        ValueError: no sets, a set that is incomplete or of another format, or sets that cannot be
            compared; or another process writes to `out`.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        files = [path] if path.is_file() else sets_below(path)
        if not files:
            raise ValueError(f"{path} must be a record set or a folder with some; there is none")
        found += files
    sets = [
        record_set(records, settings["model"], settings["benchmark"], settings["sampling"])
        for settings, records in read_sets(found)
    ]
    with locked(out):
        return report(sets, out, against)


def report(
    sets: Sequence[RecordSet], out: str | Path, against: str | None = None
) -> dict[str, Any]:
    """Tables and figures of record sets, written to `out`; returns what `report.json` holds.

    Raises:
        ValueError: sets on one benchmark have other problems, or a method's seeds other numbers of
            samples.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    groups: dict[str, dict[str, list[RecordSet]]] = defaultdict(lambda: defaultdict(list))
    for one in sets:
        groups[one.benchmark][one.model].append(one)
    models = list(dict.fromkeys(one.model for one in sets))
    against = against or models[0]
    if against not in models:
        raise ValueError(f"--against must be one of {', '.join(models)}; got {against!r}")
    table, curves, differences, coverage = [], {}, {}, {}
    for benchmark, by_model in groups.items():
        counts = {name: counts_of(benchmark, seeds, by_model) for name, seeds in by_model.items()}
        curves[benchmark] = {name: pass_at_k_curve(n, c, _ks(n)) for name, (n, c) in counts.items()}
        differences[benchmark] = {
            f"{a} - {b}": difference_curve(
                counts[a][0],
                counts[a][1],
                counts[b][0],
                counts[b][1],
                _ks(min(counts[a][0], counts[b][0])),
            )
            # The later model minus the earlier one, but always another minus `against`.
            for a, b in ((b, a) if a == against else (a, b) for b, a in combinations(counts, 2))
        }
        coverage[benchmark] = _coverage(by_model)
        table += [
            _table_row(benchmark, name, seeds, curves[benchmark][name])
            for name, seeds in by_model.items()
        ]
    sampling = [one.sampling for one in sets]
    note = "bands: 95 % bootstrap over problems" + (
        " and training seeds"
        if any(row["seeds"] > 1 for row in table)
        else ", one training seed each"
    )
    temperatures = sorted({settings["temperature"] for settings in sampling})
    note += f"; T = {', '.join(f'{t:g}' for t in temperatures)}"
    write_table(out / "table.csv", table)
    plot_pass_at_k(curves, out / "pass_at_k.png", note)
    shown = {
        benchmark: {pair: curve for pair, curve in pairs.items() if against in pair.split(" - ")}
        for benchmark, pairs in differences.items()
    }
    if any(shown.values()):
        plot_differences(shown, out / "differences.png", note + "; paired by problem")
    write_table(
        out / "coverage.csv",
        [
            {"benchmark": benchmark, "model": model, "problem": problem}
            for benchmark, found in coverage.items()
            for model, problems in found["only"].items()
            for problem in problems
        ],
    )
    result = {
        "table": table,
        "pass_at_k": _plain(curves),
        "differences": _plain(differences),
        "coverage": coverage,
        "sampling": sampling[0],
        "environment": environment(),
    }
    write_json(out / "report.json", result)
    return result


def _ks(num_samples: int) -> list[int]:
    """1, 2, 4 and so on, and n itself."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    return list(dict.fromkeys([*powers, num_samples]))


def _coverage(by_model: dict[str, list[RecordSet]]) -> dict[str, Any]:
    """Problems solved at all within the first n samples, n the smallest number that any model
    has.
    """
    least = min(one.correct.shape[1] for seeds in by_model.values() for one in seeds)
    problems = next(iter(by_model.values()))[0].problems
    solved = {}
    for name, seeds in by_model.items():
        one = seeds[0]  # several seeds would count as more samples
        order = [one.problems.index(problem) for problem in problems]
        solved[name] = one.correct[order, :least].sum(axis=1)
    return {
        "samples": least,
        "solved": {name: int((counts > 0).sum()) for name, counts in solved.items()},
        "only": {
            name: [problem for problem, mine in zip(problems, only, strict=True) if mine]
            for name, only in solved_only_by(solved).items()
        },
    }


def _table_row(
    benchmark: str, model: str, seeds: Sequence[RecordSet], curve: dict
) -> dict[str, Any]:
    problems, n = seeds[0].correct.shape
    records = [record for one in seeds for record in one.records]
    row: dict[str, Any] = {
        "benchmark": benchmark,
        "model": model,
        "problems": problems,
        "samples": n,
        "seeds": len(seeds),
    }
    for k in dict.fromkeys((1, n)):
        label = "n" if k == n and n > 1 else k
        row |= {
            f"pass@{label}{part}": round(getattr(curve[k], field), 4)
            for part, field in (("", "mean"), ("_low", "low"), ("_high", "high"))
        }
    row |= _as_papers_report(seeds)
    row["tokens"] = round(float(np.mean([record["num_tokens"] for record in records])), 1)
    row["truncated"] = round(
        float(np.mean([record["finish_reason"] == "length" for record in records])), 4
    )
    for grade in (Grade.UNPARSABLE, Grade.TIMED_OUT):
        share = np.mean([record["grade"] == grade for record in records])
        row[grade.value.replace(" ", "_")] = round(float(share), 4)
    return row


def _as_papers_report(seeds: Sequence[RecordSet]) -> dict[str, Any]:
    """pass@1 as mean ± sample deviation over training seeds, or over five equal parts of one run's
    samples.

    The parts stand for evaluation seeds, of n / 5 samples each: so the deviation is one of sampling
    alone.
    """
    if len(seeds) > 1:
        values, over = [one.correct.mean() for one in seeds], "training seeds"
    else:
        correct = seeds[0].correct
        size = correct.shape[1] // BLOCKS
        if size == 0:
            return {}
        parts = [correct[:, i * size : (i + 1) * size] for i in range(BLOCKS)]
        values = [pass_at_k(size, part.sum(axis=1), 1).mean() for part in parts]
        over = f"{BLOCKS} parts of the samples"
    mean, deviation = mean_and_deviation(values)
    return {
        "seed_mean": round(mean, 4),
        "seed_deviation": round(deviation, 4),
        "deviation_over": over,
    }


def _plain(curves: dict) -> dict:
    return {
        benchmark: {
            name: {str(k): asdict(estimate) for k, estimate in curve.items()}
            for name, curve in by_name.items()
        }
        for benchmark, by_name in curves.items()
    }


def summary(result: dict[str, Any]) -> str:
    """The report as text for a terminal: a table, differences, coverage, and how to read them."""
    lines = []
    for benchmark, curves in result["pass_at_k"].items():
        rows = {row["model"]: row for row in result["table"] if row["benchmark"] == benchmark}
        lines.append(f"{benchmark} ({next(iter(rows.values()))['problems']} problems)")
        width = max(map(len, rows)) + 2
        header = (
            f"{'pass@1':<22}{'± over parts/seeds':<20}{'pass@n':<22}{'n':<6}tokens  cut    "
            f"no answer"
        )
        lines.append("  " + " " * width + header)
        for name, row in rows.items():
            cells = [
                _cell(curves[name]["1"]),
                _deviation(row),
                _cell(curves[name][str(row["samples"])]),
            ]
            text = f"{cells[0]:<22}{cells[1]:<20}{cells[2]:<22}{row['samples']:<6}"
            text += f"{row['tokens']:<8g}{row['truncated']:<7.3f}{row['unparsable']:.3f}"
            lines.append("  " + f"{name:<{width}}" + text)
        cut = [name for name, row in rows.items() if row["truncated"] > MUCH_CUT]
        if cut:
            lines.append(
                f"  More than {MUCH_CUT:.0%} of the completions of {', '.join(cut)} were cut at "
                f"the length limit and count as wrong: "
                "raise --max-tokens, in another --out."
            )
        for pair, curve in result["differences"][benchmark].items():
            ks = list(curve)
            parts = [
                f"pass@{k} {curve[k]['mean']:+.3f} [{curve[k]['low']:+.3f}, "
                f"{curve[k]['high']:+.3f}], "
                f"above 0 in {curve[k]['share_above_zero']:.1%}"
                for k in dict.fromkeys((ks[0], ks[-1]))
            ]
            lines.append(f"  {pair}: " + "; ".join(parts))
        found = result["coverage"][benchmark]
        solved = ", ".join(
            f"{name} {count} ({len(found['only'][name])} alone)"
            for name, count in found["solved"].items()
        )
        lines += [f"  solved at least once in {found['samples']} samples: {solved}", ""]
    lines.append(
        "[ ]: 95 %, bootstrap over problems (and training seeds, where there are several), "
        "paired for differences; the percentage "
        "is that of resamples. ±: sample deviation, which says nothing about other problems."
    )
    return "\n".join(lines)


def _cell(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _deviation(row: dict[str, Any]) -> str:
    return f"{row['seed_mean']:.3f} ± {row['seed_deviation']:.3f}" if "seed_mean" in row else "-"
