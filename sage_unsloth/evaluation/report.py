"""Reports on record sets: pass@k with intervals, paired differences, coverage, tables and figures.

`report_sets` writes `report.json`, `table.csv`, `pass_at_k.png` and `differences.png` (each with a
CSV), `coverage.csv`, and all of it as one page, `comparison.html`.

Shapes: P problems, N samples per problem, S training seeds of one model.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.evaluation.comparison_page import comparison_page
from sage_unsloth.evaluation.figures import plot_differences, plot_pass_at_k
from sage_unsloth.evaluation.metrics import (
    Difference,
    Estimate,
    difference_curve,
    mean_and_deviation,
    pass_at_k,
    pass_at_k_curve,
    powers_of_two,
    unique_solutions,
)
from sage_unsloth.evaluation.partial import shared_part
from sage_unsloth.evaluation.record_tables import (
    RecordSet,
    in_order,
    read_sets,
    read_texts,
    record_set,
    seed_counts,
    sets_below,
)
from sage_unsloth.figures import write_table
from sage_unsloth.grading.checker import Grade
from sage_unsloth.runs.files import write_json, write_text
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import environment
from sage_unsloth.sampling.record_files import read_settings

BLOCKS = 5  # the paper's evaluation seeds; the samples of one run are split into as many

SetsByModel = Mapping[str, Sequence[RecordSet]]
"""model -> its record sets on one benchmark, one for each training seed"""
Counts = Mapping[str, tuple[int, np.ndarray]]
"""model -> N and the correct counts (S, P)"""


def compare_sets(
    paths: Sequence[str | Path],
    out: str | Path,
    against: str | None = None,
    *,
    partial: bool = False,
) -> dict[str, Any]:
    """Reports on existing record sets.

    Sets of one model on one benchmark are its training seeds.

    Args:
        paths: .jsonl files of record sets, or folders with some.
        against: the model that the others are compared with; None takes the first.
        partial: report on the problems and samples that all record sets on a benchmark have
            (`partial`); otherwise an incomplete set is an error.

    Raises:
        ValueError: no sets, an incomplete set or one of another format, or sets that cannot be
            compared; or another process writes to `out`.
    """
    files = find_sets(paths)
    read, parts = read_sets(files), {}
    if partial:
        read, parts = shared_part(files, read)
    else:
        for file, (_, records) in zip(files, read, strict=True):
            _refuse_missing(file, records)
    sets = [
        replace(
            record_set(records, settings["model"], settings["benchmark"], settings["sampling"]),
            texts=read_texts(file),
            provenance=read_settings(file).get("provenance", []),
        )
        for file, (settings, records) in zip(files, read, strict=True)
    ]
    with exclusive_lock(out):
        return report_sets(sets, out, against, parts)


def _refuse_missing(file: Path, records: Sequence[dict]) -> None:
    """Raises ValueError if a problem of the set has no sample at all."""
    requested = read_settings(file).get("prompts", {})
    missing = requested.keys() - {record["problem_id"] for record in records}
    if missing:
        raise ValueError(
            f"every problem must have samples, but {len(missing):,} of {len(requested):,} in "
            f"{file} have none. Run evaluate again, which samples the rest, or give --partial"
        )


def find_sets(paths: Sequence[str | Path]) -> list[Path]:
    """The files of the record sets in `paths`; ValueError for a path with none."""
    files: list[Path] = []
    for path in map(Path, paths):
        sets = [path] if path.is_file() else sets_below(path)
        if not sets:
            raise ValueError(
                f"{path} must be a record set, or a folder with some, but there is none"
            )
        files += sets
    return list(dict.fromkeys(file.resolve() for file in files))


def report_sets(
    sets: Sequence[RecordSet],
    out: str | Path,
    against: str | None = None,
    parts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Tables and figures of record sets, written to `out`; the content of `report.json`.

    Args:
        against: the model that the others are compared with; None takes the first.
        parts: benchmark -> reported part (`partial.shared_part`), stored as `partial`.

    Raises:
        ValueError: sets on one benchmark with different problems, or seeds with different numbers
            of samples.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    groups: dict[str, dict[str, list[RecordSet]]] = defaultdict(lambda: defaultdict(list))
    for item in sets:
        groups[item.benchmark][item.model].append(item)
    models = list(dict.fromkeys(item.model for item in sets))
    against = against or models[0]
    if against not in models:
        raise ValueError(f"--against must be one of {', '.join(models)}, got {against!r}")
    table, curves, differences, coverage = [], {}, {}, {}
    for benchmark, by_model in groups.items():
        first = next(iter(by_model.values()))[0]
        counts = {name: seed_counts(benchmark, result, first) for name, result in by_model.items()}
        curves[benchmark] = {
            name: pass_at_k_curve(n, correct_SP, powers_of_two(n))
            for name, (n, correct_SP) in counts.items()
        }
        differences[benchmark] = _differences(counts, against)
        coverage[benchmark] = _coverage(by_model)
        table += [
            _table_row(benchmark, name, seeds, curves[benchmark][name])
            for name, seeds in by_model.items()
        ]
    result = {
        "table": table,
        "pass_at_k": _plain(curves),
        "differences": _plain(differences),
        "coverage": coverage,
        "sampling": sets[0].sampling,
        "datasets": {
            benchmark: list(next(iter(by_model.values()))[0].provenance)
            for benchmark, by_model in groups.items()
        },
        "environment": environment(),
    }
    if parts:
        result["partial"] = dict(parts)
    _write_tables(out, table, coverage)
    note = _conditions(sets, table)
    _draw_figures(out, curves, differences, against, note)
    write_text(out / "comparison.html", comparison_page(result, groups, note))
    write_json(out / "report.json", result)
    return result


def _differences(counts: Counts, against: str) -> dict[str, dict[int, Difference]]:
    """ "a - b" -> k -> difference: the later model minus the earlier, any other minus `against`."""
    pairs = [(b, a) if a == against else (a, b) for b, a in combinations(counts, 2)]
    return {
        f"{a} - {b}": difference_curve(
            *counts[a], *counts[b], powers_of_two(min(counts[a][0], counts[b][0]))
        )
        for a, b in pairs
    }


def _coverage(by_model: SetsByModel) -> dict[str, Any]:
    """Problems solved within the first n samples, n the smallest number that any model has."""
    least = min(seed.correct.shape[1] for seeds in by_model.values() for seed in seeds)
    problems = next(iter(by_model.values()))[0].problems
    # Of the first seed alone: several seeds would count as more samples.
    solved = {
        name: in_order(seeds[0], problems)[:, :least].sum(axis=1)
        for name, seeds in by_model.items()
    }
    return {
        "samples": least,
        "solved": {name: int((counts > 0).sum()) for name, counts in solved.items()},
        "only": {
            name: [problem for problem, mine in zip(problems, only, strict=True) if mine]
            for name, only in unique_solutions(solved).items()
        },
    }


def _table_row(
    benchmark: str, model: str, seeds: Sequence[RecordSet], curve: Mapping[int, Estimate]
) -> dict[str, Any]:
    problems, n = seeds[0].correct.shape
    records = [record for seed in seeds for record in seed.records]
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
    row |= deviation_over_seeds(seeds)
    row["tokens"] = _mean([record["num_tokens"] for record in records], 1)
    row["truncated"] = _mean([record["finish_reason"] == "length" for record in records])
    for grade in (Grade.UNPARSABLE, Grade.TIMED_OUT):
        row[grade.value.replace(" ", "_")] = _mean([record["grade"] == grade for record in records])
    return row


def _mean(values: Sequence[float], digits: int = 4) -> float:
    return round(float(np.mean(values)), digits)


def deviation_over_seeds(seeds: Sequence[RecordSet]) -> dict[str, Any]:
    """pass@1 as papers print it, mean ± sample deviation over seeds.

    Over training seeds or, with one seed, over `BLOCKS` equal parts of its samples. The parts stand
    for evaluation seeds of n / `BLOCKS` samples each: that deviation is due to sampling alone.

    Returns:
        `seed_mean`, `seed_deviation` and `deviation_over`; nothing for fewer than `BLOCKS` samples.
    """
    if len(seeds) > 1:
        values, over = [seed.correct.mean() for seed in seeds], "training seeds"
    else:
        correct_PN = seeds[0].correct
        size = correct_PN.shape[1] // BLOCKS
        if size == 0:
            return {}
        parts = [correct_PN[:, i * size : (i + 1) * size] for i in range(BLOCKS)]
        values = [np.mean(pass_at_k(size, part.sum(axis=1), 1)) for part in parts]
        over = f"{BLOCKS} parts of the samples"
    mean, deviation = mean_and_deviation(values)
    return {
        "seed_mean": round(mean, 4),
        "seed_deviation": round(deviation, 4),
        "deviation_over": over,
    }


def _plain(curves: Mapping[str, Mapping[str, Mapping[int, Estimate]]]) -> dict[str, Any]:
    return {
        benchmark: {
            name: {str(k): asdict(estimate) for k, estimate in curve.items()}
            for name, curve in by_name.items()
        }
        for benchmark, by_name in curves.items()
    }


def _write_tables(out: Path, table: Sequence[dict], coverage: Mapping[str, Any]) -> None:
    write_table(out / "table.csv", table)
    write_table(
        out / "coverage.csv",
        [
            {"benchmark": benchmark, "model": model, "problem": problem}
            for benchmark, result in coverage.items()
            for model, problems in result["only"].items()
            for problem in problems
        ],
    )


def _conditions(sets: Sequence[RecordSet], table: Sequence[dict]) -> str:
    """The note below every figure: what the bands are, and the temperature."""
    several = any(row["seeds"] > 1 for row in table)
    over = " and training seeds" if several else ", one training seed each"
    known = {item.sampling["temperature"] for item in sets}
    temperatures = [f"{temperature:g}" for temperature in sorted(known)]
    return f"bands: 95 % over problems{over}; T = {', '.join(temperatures)}"


def _draw_figures(
    out: Path,
    curves: Mapping[str, Mapping[str, Mapping[int, Estimate]]],
    differences: Mapping[str, Mapping[str, Mapping[int, Difference]]],
    against: str,
    note: str,
) -> None:
    plot_pass_at_k(curves, out / "pass_at_k.png", note)
    shown = {
        benchmark: {pair: curve for pair, curve in pairs.items() if against in pair.split(" - ")}
        for benchmark, pairs in differences.items()
    }
    if any(shown.values()):
        plot_differences(shown, out / "differences.png", note + "; paired by problem")
