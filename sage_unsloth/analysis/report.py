"""The analysis of finished runs, as a command: record sets and training logs in, tables, figures
and pages out.

`analyze` leaves `analysis.json`, and of what there is to analyse `patterns.png`, `dynamics.png`,
`perplexity.png` (a CSV beside each), `dynamics_phases.csv`, `cases.html`, `tokens.html` and
`tokens.png`; of several benchmarks each has its own folder.
"""

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sage_unsloth.analysis import figures as analysis_plots
from sage_unsloth.analysis.patterns import (
    CASE_RULE,
    DYNAMICS,
    Case,
    PatternFrequency,
    benchmark_patterns,
    case_studies,
    compile_patterns,
    dynamics,
    pattern_differences,
    pattern_frequencies,
)
from sage_unsloth.analysis.sources import Sources, find_sources, problem_texts
from sage_unsloth.analysis.token_page import case_page, token_page
from sage_unsloth.evaluation.metrics import Estimate, pass_at_k_curve
from sage_unsloth.evaluation.record_tables import record_set
from sage_unsloth.figures import show_table, write_table
from sage_unsloth.models.device import frees_models
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment
from sage_unsloth.runs.text import file_name
from sage_unsloth.training.stage import read_metrics

CASES = 4


@frees_models
def analyze(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    patterns: Mapping[str, str] | None = None,
    against: str | None = None,
    baseline: str | None = None,
    responses: int = 64,
    page: bool = False,
    data: str | Path | None = None,
) -> dict[str, Any]:
    """Analyse what is in `paths`, print tables, and write figures, pages and `analysis.json` to
    `out`.

    Args:
        paths: folders of quickstarts, RL runs or evaluations, or record sets.
        out: folder.
        patterns: name -> regular expression, beside the benchmark's own.
        against: the model that others are compared with; None takes the first.
        baseline: "PATH" or "PATH+ADAPTER" of the model under which perplexity is scored; None
            scores nothing.
        responses: of each problem and model that are scored.
        page: whether to score the case studies' completions under the runs that had a guide, for
            `tokens.html`.
        data: folder of local copies of the benchmarks, for the texts of the problems.

    Returns:
        What `analysis.json` holds.

    Raises:
        ValueError: nothing to analyse, bad patterns, or sets that cannot be compared; or another
            process writes to `out`.
    """
    with locked(out):
        return _analyze(paths, Path(out), patterns, against, baseline, responses, page, data)


def _analyze(
    paths: Sequence[str | Path],
    out: Path,
    patterns: Mapping[str, str] | None,
    against: str | None,
    baseline: str | None,
    responses: int,
    page: bool,
    data: str | Path | None,
) -> dict[str, Any]:
    """`analyze` once the folder is this process's own."""
    if patterns:
        compile_patterns(patterns)
    if responses < 1:
        raise ValueError(f"--responses must be >= 1; got {responses}")
    sources = find_sources(paths)
    before = _versions(out)
    names = [name for models in sources.samples.values() for name in models]
    if against is not None and against not in names:
        raise ValueError(
            f"--against must be one of {', '.join(dict.fromkeys(names))}; got {against!r}"
        )
    if (page or baseline) and not sources.samples:
        raise ValueError(
            "perplexity and the token page need completions; there is no record set among the "
            "folders; give that of an "
            "evaluation as well"
        )
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "runs": {name: str(folder) for name, folder in sources.runs.items()},
        "benchmarks": {},
    }
    curves = {}
    for benchmark, samples in sources.samples.items():
        folder = out if len(sources.samples) == 1 else out / file_name(benchmark)
        folder.mkdir(exist_ok=True)
        first = against if against in samples else next(iter(samples))
        chosen = benchmark_patterns(benchmark) | dict(patterns or {})
        problems = {}
        if page or baseline or data or benchmark == "arithmetic":
            problems = problem_texts(benchmark, samples, data)
        found = result["benchmarks"][benchmark] = {}
        found["patterns"] = _patterns(benchmark, samples, chosen, first, folder)
        curves[benchmark] = pass_at_k_curves(benchmark, samples)
        found["pass_at_k"] = {
            m: {str(k): asdict(e) for k, e in curve.items()}
            for m, curve in curves[benchmark].items()
        }
        cases = _cases(benchmark, samples, first, problems, folder)
        found["cases"] = [asdict(case) for case in cases]
        if baseline:
            found["perplexity"] = _perplexity(
                benchmark, samples, sources, baseline, responses, problems, cases, first, folder
            )
        if page:
            found["tokens"] = _tokens(sources, samples, cases, problems, folder)
    if sources.runs:
        held_out = next(iter(curves.values()), {})
        result["dynamics"] = _dynamics(sources.runs, held_out, out)
    result["environment"] = environment()
    write_json(out / "analysis.json", result)
    made = sorted(
        str(file.relative_to(out))
        for file in out.rglob("*")
        if file.suffix in (".png", ".html", ".csv", ".json")
        and not file.name.endswith(".baseline.json")
    )
    after = _versions(out)
    new = [name for name in made if after[out / name] != before.get(out / name)]
    print(f"\nWritten to {out}: {', '.join(new)}")
    if len(new) < len(made):
        print(f"Of an earlier run: {', '.join(sorted(set(made) - set(new)))}")
    words = ["analyze", *map(str, paths), "--out", str(out)]
    for flag, value in {"--against": against, "--data": data}.items():
        words += [] if value is None else [flag, str(value)]
    for name, pattern in (patterns or {}).items():
        words += ["--pattern", f"{name}={pattern}"]
    again = shlex.join(words)
    if sources.samples and not page and sources.runs:
        print(f"\nNext: python -m sage_unsloth {again} --page")
    elif sources.samples and not baseline:
        print(
            f"\nNext: python -m sage_unsloth {again} --perplexity BASELINE, the folder or hub id "
            f"of the model to score by"
        )
    return result


def _versions(folder: Path) -> dict[Path, tuple[int, int]]:
    """Inode and modification time of every file, which are compared for equality alone: clocks are
    set back.
    """
    return {f: (f.stat().st_ino, f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()}


def cell(estimate: Estimate | Mapping[str, float] | None, sign: str = "", digits: int = 3) -> str:
    """A mean with its interval, for a table."""
    if estimate is None:
        return "-"
    values = estimate if isinstance(estimate, Mapping) else vars(estimate)
    form = f"{sign}.{digits}f"
    return f"{values['mean']:{form}} [{values['low']:{form}}, {values['high']:{form}}]"


def pattern_rows(frequencies: Sequence[PatternFrequency]) -> list[dict[str, str]]:
    """Frequencies with their intervals and counts, for `figures.show_table`."""
    return [
        {
            "pattern": row.pattern,
            "model": row.model,
            "frequency": cell(row.frequency),
            "solutions": f"{row.shown} of {row.correct}",
            "problems": f"{row.problems_shown} of {row.problems}",
        }
        for row in frequencies
    ]


def phase_rows(phases: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """`patterns.dynamics` with a column for each third, for `figures.show_table`."""
    table: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in phases:
        table[row["metric"], row["run"]][row["phase"]] = cell(row, digits=4)
    columns = list(dict.fromkeys(row["phase"] for row in phases))
    return [
        {"metric": DYNAMICS[metric], "run": run} | {name: found.get(name, "-") for name in columns}
        for (metric, run), found in sorted(
            table.items(), key=lambda item: list(DYNAMICS).index(item[0][0])
        )
    ]


def perplexity_rows(table: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """`perplexity.perplexity_table`, for `figures.show_table`."""
    return [
        {
            "statistic": row["statistic"],
            "model": row["model"],
            "mean over problems": cell(row),
            "difference": cell(
                {
                    name: row[key]
                    for name, key in (
                        ("mean", "difference"),
                        ("low", "difference_low"),
                        ("high", "difference_high"),
                    )
                },
                "+",
            )
            if "difference" in row
            else "-",
            "problems": str(row["problems"]),
            "responses": str(row["responses"]),
        }
        for row in sorted(table, key=lambda row: row["statistic"])
    ]


def _patterns(
    benchmark: str,
    samples: Mapping[str, Sequence[dict]],
    patterns: Mapping[str, Any],
    against: str,
    folder: Path,
) -> dict[str, Any]:
    frequencies = pattern_frequencies(samples, patterns)
    differences = pattern_differences(samples, patterns, against)
    print(f"\n{benchmark}: patterns in correct solutions (Eq. 13)")
    show_table(pattern_rows(frequencies))
    if differences:
        print(f"\nDifferences to {against}, paired over the problems that both solve:")
        show_table([row | {"difference": cell(row["difference"], "+")} for row in differences])
    note = f"{benchmark}; intervals: 95 % bootstrap over problems with a correct solution"
    analysis_plots.plot_patterns(frequencies, folder / "patterns.png", note)
    return {
        "expressions": {
            name: list((e,) if isinstance(e, str) else e) for name, e in patterns.items()
        },
        "frequencies": [asdict(row) for row in frequencies],
        "differences": [
            row | {"difference": row["difference"] and vars(row["difference"])}
            for row in differences
        ],
    }


def pass_at_k_curves(
    benchmark: str, samples: Mapping[str, Sequence[dict]]
) -> dict[str, dict[int, Estimate]]:
    """model -> k -> pass@k, for the powers of 2 up to n, and n itself."""
    curves = {}
    for model, records in samples.items():
        correct = record_set(records, model, benchmark, {}).correct
        n = correct.shape[1]
        ks = list(dict.fromkeys([*(2**i for i in range(n.bit_length()) if 2**i <= n), n]))
        curves[model] = pass_at_k_curve(n, correct.sum(axis=1), ks)
    return curves


def _cases(
    benchmark: str,
    samples: Mapping[str, Sequence[dict]],
    against: str,
    problems: Mapping[str, str],
    folder: Path,
) -> list[Case]:
    """Of the last model against the one named; written as a page."""
    others = [name for name in samples if name != against]
    if not others:
        return []
    cases = case_studies(samples, others[-1], against, CASES, problems)
    rule = CASE_RULE.format(a=others[-1], b=against)
    page = case_page(cases, f"Case studies: {benchmark}", rule)
    (folder / "cases.html").write_text(page, encoding="utf-8")
    print(f"\nCase studies (cases.html), picked by rule: {rule}.")
    show_table(
        [
            {"problem": case.problem_id}
            | {
                model: f"{found['correct']} of {found['samples']}"
                for model, found in case.models.items()
            }
            for case in cases
        ]
    )
    return cases


def _perplexity(
    benchmark: str,
    samples: Mapping[str, Sequence[dict]],
    sources: Sources,
    baseline: str,
    responses: int,
    problems: Mapping[str, str],
    cases: Sequence[Case],
    against: str,
    folder: Path,
) -> dict[str, Any]:
    from tqdm.auto import tqdm

    from sage_unsloth.analysis import perplexity
    from sage_unsloth.evaluation.evaluator import parse_model
    from sage_unsloth.models.weights import model_identity

    spec = parse_model(f"baseline={baseline}")
    identity = model_identity(spec.path, spec.adapter)
    chosen = {
        model: [record for record in records if record["sample"] < responses]
        for model, records in samples.items()
    }
    model, tokenizer = perplexity.load_scorer(spec.path, spec.adapter)
    scores = {}
    with tqdm(total=sum(map(len, chosen.values())), unit="response") as bar:
        for name, records in chosen.items():
            bar.set_description(f"{name} under the baseline")
            scores[name] = perplexity.score_records(
                model,
                tokenizer,
                records,
                problems,
                folder / "perplexity" / f"{file_name(name)}.jsonl",
                settings={"baseline": identity, "set": sources.settings[benchmark, name]},
                bar=bar,
            )
    table = perplexity.perplexity_table(scores, against)
    print(f"\nPerplexity under {baseline} (Eq. 39), up to {responses} responses of each problem:")
    show_table(perplexity_rows(table))
    values = {name: perplexity.perplexities(rows) for name, rows in scores.items()}
    drawn = [case.problem_id for case in cases] or list(values[against])[:CASES]
    analysis_plots.plot_perplexity(
        values,
        {name: problems[name] if len(problems[name]) <= 60 else name for name in drawn},
        folder / "perplexity.png",
        f"{benchmark}; baseline {baseline}; the problems of the case studies",
    )
    return {"baseline": baseline, "table": table}


def _tokens(
    sources: Sources,
    samples: Mapping[str, Sequence[dict]],
    cases: Sequence[Case],
    problems: Mapping[str, str],
    folder: Path,
) -> list[dict[str, Any]]:
    """`tokens.html` and `tokens.png`: the case studies' completions under the runs whose guide did
    something.
    """
    from sage_unsloth.analysis.traces import run_traces

    traces = []
    for name, run in sources.runs.items():
        if name in samples and any(row.get("sage/share_touched") for row in read_metrics(run)):
            traces += list(run_traces(name, run, cases, problems))
    if not traces:
        raise ValueError(
            "the token page shows runs with a guide that changed some token, and their "
            "completions; none of "
            f"{', '.join(sources.runs) or 'no runs'} is one with records among "
            f"{', '.join(samples)}; leave --page out"
        )
    title = "Where the guide acts, token by token"
    note = (
        "The case studies' completions, scored under the trained policy; the guide as it "
        "stands at the last step."
    )
    page = token_page([trace for trace, _ in traces], title, note)
    (folder / "tokens.html").write_text(page, encoding="utf-8")
    # The figure shows the completion that the guide changed most.
    trace, guide = max(traces, key=lambda pair: sum(map(abs, pair[0].log_guides)))
    analysis_plots.plot_trace(
        trace, folder / "tokens.png", repr(guide), getattr(guide, "threshold", None)
    )
    print(
        f"\nWhere the guide acts (tokens.html): {len(traces)} completions, "
        f"{sum(value != 0 for trace, _ in traces for value in trace.log_guides)} of "
        f"{sum(len(trace.tokens) for trace, _ in traces)} tokens with q ≠ 1"
    )
    return [asdict(trace) for trace, _ in traces]


def _dynamics(
    runs: Mapping[str, Path], curves: Mapping[str, Mapping[int, Estimate]], out: Path
) -> list[dict[str, Any]]:
    metrics = {name: read_metrics(folder) for name, folder in runs.items()}
    phases = dynamics(metrics)
    print(
        "\nTraining, thirds of the optimizer steps (95 %: block bootstrap over the steps of this "
        "one run):"
    )
    show_table(phase_rows(phases))
    write_table(out / "dynamics_phases.csv", phases)
    note = "thin: each step, thick: moving average over 9 steps"
    if curves:
        note += "; bands: 95 % bootstrap over problems"
    analysis_plots.plot_dynamics(metrics, curves, out / "dynamics.png", note)
    return phases
