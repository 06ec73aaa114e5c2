"""The analysis of finished runs: from record sets and training logs to tables, figures and pages.

`analyze` writes `analysis.json` and, if there is data for them, `patterns.png`, `dynamics.png`,
`perplexity.png` (each with a CSV), `dynamics_phases.csv`, `cases.html`, `tokens.html` and
`tokens.png`; several benchmarks have their own folders.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.analysis import figures, kinds
from sage_unsloth.analysis.patterns import (
    CASE_RULE,
    Case,
    benchmark_patterns,
    case_studies,
    compile_patterns,
    dynamics,
    pattern_differences,
    pattern_frequencies,
)
from sage_unsloth.analysis.sources import Sources, find_sources, problem_texts
from sage_unsloth.analysis.tables import no_interval, pattern_rows, perplexity_rows, phase_rows
from sage_unsloth.analysis.token_page import case_page, trace_page
from sage_unsloth.analysis.traces import rollout_cases
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.evaluation.metrics import pass_at_k_curve, powers_of_two
from sage_unsloth.evaluation.record_tables import record_set
from sage_unsloth.evaluation.report_text import interval_text
from sage_unsloth.figures import show_table, write_table
from sage_unsloth.models.device import frees_models
from sage_unsloth.problems.benchmarks import Benchmark as ProblemSet
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import environment, read_record
from sage_unsloth.runs.text import file_name
from sage_unsloth.training.stage import read_metrics

NUM_CASES = 4


@dataclass(frozen=True, kw_only=True)
class BenchmarkSamples:
    """The data of one benchmark.

    Attributes:
        samples: model -> records.
        against: the model that the others are compared with.
        problems: id -> text; empty if no step needs the texts.
    """

    name: str
    samples: Mapping[str, Sequence[dict]]
    against: str
    problems: Mapping[str, str]
    folder: Path


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
    known: Mapping[str, ProblemSet] | None = None,
    guide: Any = None,
) -> dict[str, Any]:
    """Analyses `paths`: shows tables, writes figures, pages and `analysis.json` to `out`.

    Args:
        paths: folders of quickstarts, RL runs or evaluations, or record sets.
        patterns: name -> regular expression, in addition to the benchmark's own.
        against: the model that others are compared with; None takes the first.
        baseline: "PATH" or "PATH+ADAPTER" of the model for perplexity; None scores nothing.
        responses: number scored of each problem and model.
        page: score the case studies' completions with the runs that had a guide, for `tokens.html`;
            for runs without a record set, completions of their last step.
        data: folder of local copies of the benchmarks, for the texts of the problems.
        known: benchmarks that are already loaded, by name.
        guide: a custom guide of the runs; None reads those in `run.json`.

    Returns:
        The content of `analysis.json`.

    Raises:
        ValueError: nothing to analyse, bad patterns, or sets that cannot be compared; or another
            process writes to `out`.
    """
    out, patterns, known = Path(out), dict(patterns or {}), known or {}
    with exclusive_lock(out):
        if patterns:
            compile_patterns(patterns)
        if responses < 1:
            raise ValueError(f"--responses must be >= 1, got {responses}")
        sources = find_sources(paths)
        _check_sources(sources, against, page=page, baseline=baseline)
        out.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {
            "runs": {name: str(folder) for name, folder in sources.runs.items()},
            "benchmarks": {},
        }
        held_out: Mapping[str, Mapping[int, Estimate]] = {}
        for name, samples in sources.samples.items():
            texts = page or baseline or data or name in (*sources.texts, *known, "arithmetic")
            item = BenchmarkSamples(
                name=name,
                samples=samples,
                against=against if against in samples else next(iter(samples)),
                problems=problem_texts(name, sources, data, known.get(name)) if texts else {},
                folder=out if len(sources.samples) == 1 else out / file_name(name),
            )
            item.folder.mkdir(exist_ok=True)
            matches: dict[str, Any] = {
                "kinds": kinds.of_samples(name, samples),
                "patterns": _analyze_patterns(item, patterns),
            }
            result["benchmarks"][name] = matches
            curves = pass_at_k_curves(name, samples)
            held_out = held_out or curves
            matches["pass_at_k"] = {
                model: {str(k): asdict(estimate) for k, estimate in curve.items()}
                for model, curve in curves.items()
            }
            cases = _study_cases(item)
            matches["cases"] = [asdict(case) for case in cases]
            if baseline:
                matches["perplexity"] = _analyze_perplexity(
                    item, sources, baseline, responses, cases
                )
            if page:
                traces = _guided_traces(
                    {run: folder for run, folder in sources.runs.items() if run in samples},
                    lambda run, cases=cases, item=item: (
                        (cases, item.problems)
                        if cases
                        else rollout_cases(run, sources.runs[run], NUM_CASES)
                    ),
                    guide,
                )
                matches["tokens"] = _write_token_page(traces, item.folder)
        if page and not sources.samples:
            traces = _guided_traces(
                sources.runs, lambda run: rollout_cases(run, sources.runs[run], NUM_CASES), guide
            )
            result["tokens"] = _write_token_page(traces, out)
        if sources.runs:
            result["dynamics"] = _analyze_dynamics(sources.runs, held_out, out)
            result["kinds"] = kinds.of_runs(sources.runs)
        result["environment"] = environment()
        write_json(out / "analysis.json", result)
        return result


def _check_sources(
    sources: Sources, against: str | None, *, page: bool, baseline: str | None
) -> None:
    names = dict.fromkeys(name for models in sources.samples.values() for name in models)
    if against is not None and against not in names:
        known = (
            f"one of {', '.join(names)}" if names else "a model of a record set, and none has any"
        )
        raise ValueError(f"--against must be {known}, got {against!r}")
    if not sources.samples and (baseline or (page and not sources.runs)):
        raise ValueError(
            "perplexity needs completions, but no folder has a record set. Give an evaluation's "
            "folder as well"
        )


def _analyze_patterns(item: BenchmarkSamples, more: Mapping[str, str]) -> dict[str, Any]:
    patterns = benchmark_patterns(item.name) | dict(more)
    frequencies = pattern_frequencies(item.samples, patterns)
    differences = pattern_differences(item.samples, patterns, item.against)
    reason = no_interval(
        [vars(row.frequency) for row in frequencies if row.frequency], "one problem"
    )
    title = f"{item.name}: patterns in correct solutions (Eq. 13{reason})"
    show_table(pattern_rows(frequencies), title)
    if differences:
        show_table(
            [row | {"difference": interval_text(row["difference"], "+")} for row in differences],
            f"Differences to {item.against}, paired over the problems that both solve:",
        )
    note = f"{item.name}; intervals: 95 % over problems with a correct solution"
    figures.plot_patterns(frequencies, item.folder / "patterns.png", note)
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
        correct_PN = record_set(records, model, benchmark, {}).correct
        n = correct_PN.shape[1]
        curves[model] = pass_at_k_curve(n, correct_PN.sum(axis=1), powers_of_two(n))
    return curves


def _study_cases(item: BenchmarkSamples) -> list[Case]:
    """Compares the last model with the named one; writes a page."""
    others = [name for name in item.samples if name != item.against]
    if not others:
        return []
    cases = case_studies(item.samples, others[-1], item.against, NUM_CASES, item.problems)
    rule = CASE_RULE.format(a=others[-1], b=item.against)
    page = case_page(cases, f"Case studies: {item.name}", rule)
    (item.folder / "cases.html").write_text(page, encoding="utf-8")
    show_table(
        [
            {"problem": case.problem_id}
            | {
                model: f"{result['correct']} of {result['samples']}"
                for model, result in case.models.items()
            }
            for case in cases
        ],
        f"Case studies (cases.html), picked by rule: {rule}.",
    )
    return cases


def _analyze_perplexity(
    item: BenchmarkSamples, sources: Sources, baseline: str, responses: int, cases: Sequence[Case]
) -> dict[str, Any]:
    from sage_unsloth.analysis import perplexity
    from sage_unsloth.evaluation.named_models import parse_model
    from sage_unsloth.models.tokenizers import tokenizer_as_sampled
    from sage_unsloth.models.weights import model_identity
    from sage_unsloth.prompts import recorded_format
    from sage_unsloth.runs.progress import progress

    spec = parse_model(f"baseline={baseline}", load_in_4bit=False)
    identity = model_identity(spec.path, spec.adapter)
    chosen = {
        model: [record for record in records if record["sample"] < responses]
        for model, records in item.samples.items()
    }
    model, _ = perplexity.load_scorer(spec.path, spec.adapter)
    scores = {}
    with progress(total=sum(map(len, chosen.values())), unit="response") as bar:
        for name, records in chosen.items():
            bar.set_description(f"{name} under the baseline")
            settings = sources.settings[item.name, name]
            # Conditioned on the prompt that was sampled from.
            template, prompt = settings.get("template"), recorded_format(settings)
            tokenizer = tokenizer_as_sampled(spec.path, template or "project", prompt)
            scores[name] = perplexity.score_records(
                model,
                tokenizer,
                records,
                item.problems,
                item.folder / "perplexity" / f"{file_name(name)}.jsonl",
                settings={"baseline": identity, "set": settings},
                bar=bar,
            )
    table = perplexity.perplexity_table(scores, item.against)
    show_table(
        perplexity_rows(table),
        f"Perplexity under {baseline} (Eq. 39), up to {responses} responses of each problem:",
    )
    values = {name: perplexity.perplexities(rows) for name, rows in scores.items()}
    drawn = [case.problem_id for case in cases] or list(values[item.against])[:NUM_CASES]
    titles = {p: text if len(text := item.problems[p]) <= 60 else p for p in drawn}
    note = f"{item.name}; baseline {baseline}; the problems of the case studies"
    figures.plot_perplexity(values, titles, item.folder / "perplexity.png", note)
    return {"baseline": baseline, "table": table}


def _guided_traces(
    runs: Mapping[str, Path],
    cases_of: Callable[[str], tuple[Sequence[Case], Mapping[str, Any]]],
    guide: Any,
) -> list[tuple[Any, Any]]:
    """Traces, each with its guide, of the runs whose guide changed some token.

    Args:
        runs: name -> folder.
        cases_of: a run's name -> its cases, and the texts of their problems.
        guide: of all runs; None reads each run's own.

    Raises:
        ValueError: there is none; or see `traces.run_traces`.
    """
    from sage_unsloth.analysis.traces import run_traces

    traces: list[tuple[Any, Any]] = []
    for name, run in runs.items():
        record = read_record(run)
        # The page has no log-probabilities of a teacher.
        if record is not None and record["settings"].get("teacher"):
            continue
        if any(row.get("sage/share_touched") for row in read_metrics(run)):
            traces += run_traces(name, run, *cases_of(name), guide)
    if not traces:
        raise ValueError(
            "the token page needs records of a run whose guide changed a token and needs no "
            f"teacher, got {', '.join(runs) or 'no such run'}. Leave --page out"
        )
    return traces


def _write_token_page(traces: Sequence[tuple[Any, Any]], folder: Path) -> list[dict[str, Any]]:
    page = trace_page(
        [trace for trace, _ in traces],
        "Where the guide acts, token by token",
        "Completions, scored under the trained policy; the guide as it is at the last step.",
    )
    (folder / "tokens.html").write_text(page, encoding="utf-8")
    # The figure shows the completion that the guide changed most.
    trace, guide = max(traces, key=lambda pair: sum(map(abs, pair[0].log_guides)))
    threshold = getattr(guide, "threshold", None)
    figures.plot_trace(trace, folder / "tokens.png", repr(guide), threshold)
    counts = {
        "completions": len(traces),
        "tokens": sum(len(trace.tokens) for trace, _ in traces),
        "tokens with q ≠ 1": sum(v != 0 for trace, _ in traces for v in trace.log_guides),
    }
    show_table([counts], "Where the guide acts (tokens.html):")
    return [asdict(trace) for trace, _ in traces]


def _analyze_dynamics(
    runs: Mapping[str, Path], curves: Mapping[str, Mapping[int, Estimate]], out: Path
) -> list[dict[str, Any]]:
    metrics = {name: read_metrics(folder) for name, folder in runs.items()}
    phases = dynamics(metrics)
    show_table(
        phase_rows(phases),
        "Training, thirds of the optimizer steps (95 %: block bootstrap over the steps of this "
        f"one run{no_interval(phases, 'one or two steps')}):",
    )
    write_table(out / "dynamics_phases.csv", phases)
    note = "thin: each step, thick: moving average over 9 steps"
    if curves:
        note += "; bands: 95 % over problems"
    figures.plot_dynamics(metrics, curves, out / "dynamics.png", note)
    return phases
