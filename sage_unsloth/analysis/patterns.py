"""What models do differently, from their graded samples and training logs alone.

Patterns in correct solutions, the course of training, and case studies.

Shapes: P problems. A *sample* is a record as `sampling.record_files` describes it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sage_unsloth.evaluation.bootstrap import series_interval
from sage_unsloth.evaluation.intervals import (
    Difference,
    Estimate,
    paired_interval,
    score_interval,
)
from sage_unsloth.grading.checker import Grade
from sage_unsloth.prompts import REASONING_START
from sage_unsloth.sampling.counts import correct_matrix

# x, $x$, \(x\), \alpha
_VARIABLE = r"(?:\$|\\\(|\()*(?:[a-z](?![a-z])|\\[a-z]+)"
PATTERNS: dict[str, tuple[str, ...]] = {
    "constraint setup": (
        rf"\blet\s+{_VARIABLE}",  # "let x", "let $x$"; not "let us", "let's"
        rf"\bdenot(?:e|es|ed|ing)\s+(?:by\s+)?{_VARIABLE}",
    ),
    "structural reasoning": (
        r"\bof\s+the\s+form\b",
        r"\bdecompos(?:e|es|ed|ing)\s+into\b",
    ),
    "proof by contradiction": (
        r"\bassum(?:e|es|ed|ing),?\s+for\s+(?:the\s+sake\s+of\s+)?(?:a\s+)?contradiction\b",
        r"\b(?:leads?|led|leading)\s+to\s+a\s+contradiction\b",
    ),
}
"""The paper's three patterns (App. G): its keywords, inflected, in upper or lower case."""

_ARITHMETIC = rf"^(?:{re.escape(REASONING_START)})?\s*"
ARITHMETIC_PATTERNS: dict[str, tuple[str, ...]] = {
    "rounding up (the rare way)": (_ARITHMETIC + r"\d+=\d*0-\d;",),
    "splitting at the ten": (_ARITHMETIC + r"\d+=\d*0\+\d;",),
    "another split": (_ARITHMETIC + r"\d+=(?!\d*0\+\d;)\d+\+\d+;",),
}
"""The ways of solving the embedded task, by their first step; see `problems.arithmetic`."""

DYNAMICS = {
    "reward": "reward",
    "grad_norm": "gradient norm",
    "sage/entropy": "entropy (nats)",
    "kl/ref_k3": "KL to π_ref (k3, nats)",
    "kl/anchor_k3": "KL to q·π_ref (k3, nats)",
    "sage/guide_mean": "mean guide q",
    "sage/share_touched": "share of tokens with q ≠ 1",
    "frac_reward_zero_std": "share of dead groups",
}
"""The metrics of a training run that are compared, and what they are called."""
RUN_THIRDS = ("early", "middle", "late")


def benchmark_patterns(benchmark: str) -> dict[str, tuple[str, ...]]:
    """The paper's patterns, or those of the embedded task on it."""
    return ARITHMETIC_PATTERNS if benchmark == "arithmetic" else PATTERNS


def compile_patterns(
    patterns: Mapping[str, str | Sequence[str]],
) -> dict[str, tuple[re.Pattern[str], ...]]:
    """The expressions of each pattern, any of which shows it.

    Raises:
        ValueError: there are none, or one is no regular expression.
    """
    if not patterns:
        raise ValueError("an analysis of patterns needs at least one pattern")
    compiled = {}
    for name, expressions in patterns.items():
        texts = (expressions,) if isinstance(expressions, str) else tuple(expressions)
        try:
            compiled[name] = tuple(re.compile(text, re.IGNORECASE) for text in texts)
        except re.error as error:
            raise ValueError(
                f"a pattern must be a regular expression, but {name!r} has {error.pattern!r}: "
                f"{error}"
            ) from None
        if not texts:
            raise ValueError(f"a pattern needs at least one expression, but {name!r} has none")
    return compiled


@dataclass(frozen=True)
class PatternFrequency:
    """How often one model's correct solutions show a pattern, and the counts behind the number.

    Attributes:
        frequency: Eq. 13 with its 95 % interval over problems; None where nothing was solved.
        shown, correct: solutions that show the pattern, and correct solutions.
        problems_shown, problems: problems with such a solution, and with a correct one.
    """

    model: str
    pattern: str
    frequency: Estimate | None
    shown: int
    correct: int
    problems_shown: int
    problems: int


def pattern_frequencies(
    samples: Mapping[str, Sequence[dict]], patterns: Mapping[str, str | Sequence[str]]
) -> list[PatternFrequency]:
    """Eq. 13: how often *correct* solutions show a pattern.

    The mean over problems of the share of a problem's correct solutions that show it. A problem
    without a correct solution has no share; `problems` counts the others. The interval is over
    problems (`intervals.score_interval`), so it is wide if few are solved.

    Args:
        samples: model -> records.
        patterns: name -> one or more regular expressions.

    Raises:
        ValueError: see `compile_patterns`.
    """
    table = []
    for model, records in samples.items():
        for pattern, counts in _pattern_counts(records, patterns).items():
            shares = [shown / correct for shown, correct in counts.values()]
            table.append(
                PatternFrequency(
                    model,
                    pattern,
                    score_interval(np.array([shares])) if shares else None,
                    shown=sum(shown for shown, _ in counts.values()),
                    correct=sum(correct for _, correct in counts.values()),
                    problems_shown=sum(shown > 0 for shown, _ in counts.values()),
                    problems=len(counts),
                )
            )
    return table


def pattern_differences(
    samples: Mapping[str, Sequence[dict]],
    patterns: Mapping[str, str | Sequence[str]],
    against: str,
) -> list[dict[str, Any]]:
    """Eq. 13 of each other model minus that of `against`, paired over problems that both solve.

    Returns:
        Rows of `pattern`, `pair`, `difference` (None without a common solved problem) and
        `problems`.
    """
    counts = {model: _pattern_counts(records, patterns) for model, records in samples.items()}
    rows = []
    for pattern in patterns:
        for model in samples:
            if model == against:
                continue
            a, b = counts[model][pattern], counts[against][pattern]
            both = [problem for problem in a if problem in b]
            shares_a, shares_b = ([[c[p][0] / c[p][1] for p in both]] for c in (a, b))
            result: Difference | None = paired_interval(shares_a, shares_b) if both else None
            rows.append(
                {
                    "pattern": pattern,
                    "pair": f"{model} - {against}",
                    "difference": result,
                    "problems": len(both),
                }
            )
    return rows


def _pattern_counts(
    records: Sequence[dict], patterns: Mapping[str, str | Sequence[str]]
) -> dict[str, dict[str, tuple[int, int]]]:
    """pattern -> solved problem -> (correct solutions that show it, correct solutions)."""
    compiled = compile_patterns(patterns)
    solutions: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if record["grade"] == Grade.CORRECT:
            solutions[record["problem_id"]].append(record["completion"])
    return {
        name: {
            problem: (sum(any(e.search(text) for e in expressions) for text in texts), len(texts))
            for problem, texts in solutions.items()
        }
        for name, expressions in compiled.items()
    }


def dynamics(runs: Mapping[str, Sequence[Mapping]]) -> list[dict[str, Any]]:
    """The metrics of `DYNAMICS` in each third of a run's optimizer steps.

    Args:
        runs: name -> rows of `metrics.jsonl` (`stage.read_metrics`).

    Returns:
        Rows of `run`, `phase`, `steps` ("1-33"), `metric`, `mean`, `low`, `high`: 95 % by
        `series_interval`, about this run's steps only; None without an interval. Unlogged metrics
        are left out.

    Raises:
        ValueError: a run has no steps.
    """
    table = []
    for run, rows in runs.items():
        if not rows:
            raise ValueError(f"a training run must have steps, but {run} has none. Train it first")
        for phase, places in zip(RUN_THIRDS, np.array_split(np.arange(len(rows)), 3), strict=True):
            third = [rows[place] for place in places]
            for metric in DYNAMICS:
                values = [row[metric] for row in third if metric in row]
                if not values:
                    continue
                result = vars(series_interval(values)).items()
                table.append(
                    {
                        "run": run,
                        "phase": phase,
                        "steps": f"{third[0]['step']}-{third[-1]['step']}",
                        "metric": metric,
                    }
                    | {name: None if math.isnan(value) else value for name, value in result}
                )
    return table


@dataclass(frozen=True)
class Case:
    """The solutions of several models to one problem.

    Attributes:
        problem: its text, if known.
        gold: the reference answer.
        models: model -> `correct`, `samples` (counts), `first correct` and `first wrong` (records
            or None).
    """

    problem_id: str
    problem: str | None
    gold: str
    models: dict[str, dict[str, Any]]


CASE_RULE = (
    "the problems with the largest difference between {a} and {b} in the number of correct "
    "samples, in the benchmark's order where it is equal; of each model the first correct and the "
    "first wrong sample, by the sample's number"
)


def case_studies(
    samples: Mapping[str, Sequence[dict]],
    a: str,
    b: str,
    count: int = 3,
    problems: Mapping[str, str] | None = None,
) -> list[Case]:
    """The solutions of all models to the problems on which `a` and `b` differ most.

    `CASE_RULE` selects the problems, not a person.

    Args:
        samples: model -> records, all on the same problems with the same number of samples.
        a, b: models whose numbers of correct samples are compared.
        problems: id -> text.

    Raises:
        ValueError: a model without records, with other problems or numbers of samples, or a problem
            without the samples 0 to N - 1.
    """
    for name in (a, b):
        if name not in samples:
            raise ValueError(f"models to compare must be among {', '.join(samples)}, got {name!r}")
    grouped = {model: _by_problem(records) for model, records in samples.items()}
    _check_sizes(grouped, a)
    correct = {
        model: dict(
            zip(
                result,
                correct_matrix(samples[model], list(result)).sum(axis=1).tolist(),
                strict=True,
            )
        )
        for model, result in grouped.items()
    }
    order = sorted(grouped[a], key=lambda p: -abs(correct[a][p] - correct[b][p]))  # stable
    cases = []
    for problem in order[:count]:
        models = {}
        for model, result in grouped.items():
            rows = result[problem]
            models[model] = {
                "correct": correct[model][problem],
                "samples": len(rows),
                "first correct": next(filter(_is_correct, rows), None),
                "first wrong": next((row for row in rows if not _is_correct(row)), None),
            }
        text = None if problems is None else problems.get(problem)
        cases.append(Case(problem, text, grouped[a][problem][0]["gold"], models))
    return cases


def _check_sizes(grouped: Mapping[str, Mapping[str, Sequence[dict]]], first: str) -> None:
    """Checks that every model has as many samples of each problem as the first."""
    expected = {problem: len(rows) for problem, rows in grouped[first].items()}
    for model, result in grouped.items():
        size = {problem: len(rows) for problem, rows in result.items()}
        if size != expected:
            strange = next(p for p in [*size, *expected] if size.get(p) != expected.get(p))
            raise ValueError(
                "case studies need as many samples of every model on the same problems, but "
                f"{strange!r} has {expected.get(strange, 0)} of {first} and {size.get(strange, 0)} "
                f"of {model}. Evaluate both alike"
            )


def _is_correct(record: Mapping) -> bool:
    return record["grade"] == Grade.CORRECT


def _by_problem(records: Sequence[dict]) -> dict[str, list[dict]]:
    """problem -> its records by sample number; problems in order of first appearance."""
    result: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        result[record["problem_id"]].append(record)
    return {p: sorted(rows, key=lambda record: record["sample"]) for p, rows in result.items()}
