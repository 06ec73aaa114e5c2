"""How answers reach their grade, by kind of comparison: a kind that suddenly grows is a reward that
is being gamed, or a format that drifts.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.figures import show_table
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.sampling.kinds import correct_shares, count_kinds
from sage_unsloth.training.stage import COMPLETIONS

THIRDS = ("first third", "middle third", "last third")
MIN_RATIO, MIN_INCREASE = 2.0, 0.05
"""A kind has grown if its share of the right answers is so many times what it was in the first
third of a run, and at least so much more."""

logger = logging.getLogger(__name__)


def of_samples(benchmark: str, samples: Mapping[str, Sequence[dict]]) -> dict[str, Any]:
    """model -> `count_kinds` of its records; shown as a table."""
    counts = {model: count_kinds(records) for model, records in samples.items()}
    show_table(
        [
            {"model": model, "kind": kind} | result | {"of the correct": _share(result, of_model)}
            for model, of_model in counts.items()
            for kind, result in of_model.items()
        ],
        f"{benchmark}: how answers reached their grade",
    )
    return counts


def of_runs(runs: Mapping[str, Path]) -> dict[str, Any]:
    """run -> third of its logged rollouts -> `count_kinds`; shown, and a kind that grew is logged.

    Runs without rollouts on disk are left out.
    """
    counts, rows = {}, []
    for name, folder in runs.items():
        result = _thirds(_rollouts(folder))
        if not result:
            continue
        counts[name] = result
        for kind in dict.fromkeys(kind for third in result.values() for kind in third):
            cells = {
                part: _cell(result[part].get(kind), result[part])
                for part in THIRDS
                if part in result
            }
            rows.append({"run": name, "kind": kind} | cells)
        for kind, (before, now) in grown(result).items():
            logger.warning(
                "%s: %s answers were %.0f %% of the correct ones in the first third of the logged "
                "steps and are %.0f %% in the last. Look at them in %s",
                *(name, kind, 100 * before, 100 * now, folder / COMPLETIONS),
            )
    if rows:
        show_table(rows, "Rollouts: correct answers by kind of comparison")
    return counts


def grown(thirds: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, tuple[float, float]]:
    """kind -> share of the right answers in the first and last third, of kinds that have grown by
    `MIN_RATIO` and `MIN_INCREASE`.
    """
    if THIRDS[0] not in thirds or THIRDS[-1] not in thirds:
        return {}
    before, now = (correct_shares(thirds[part]) for part in (THIRDS[0], THIRDS[-1]))
    if not before:  # nothing was right, so everything that is right now has grown
        return {}
    return {
        kind: (before.get(kind, 0.0), share)
        for kind, share in now.items()
        if share >= MIN_RATIO * before.get(kind, 0.0)
        and share >= before.get(kind, 0.0) + MIN_INCREASE
    }


def _rollouts(folder: Path) -> list[dict]:
    file = folder / COMPLETIONS
    return read_jsonl(file) if file.is_file() else []


def _thirds(rollouts: Sequence[dict]) -> dict[str, dict[str, dict[str, int]]]:
    """Third of the logged steps -> counts; under three steps there is the last third alone."""
    steps = sorted({row["step"] for row in rollouts})
    if not steps:
        return {}
    if len(steps) < len(THIRDS):
        return {THIRDS[-1]: count_kinds(rollouts)}
    place = {step: THIRDS[i * len(THIRDS) // len(steps)] for i, step in enumerate(steps)}
    return {
        part: count_kinds(row for row in rollouts if place[row["step"]] == part) for part in THIRDS
    }


def _share(result: Mapping[str, int], of_all: Mapping[str, Mapping[str, int]]) -> str:
    total = sum(item["correct"] for item in of_all.values())
    return f"{result['correct'] / total:.1%}" if total else "-"


def _cell(result: Mapping[str, int] | None, of_all: Mapping[str, Mapping[str, int]]) -> str:
    if result is None:
        return "-"
    return f"{result['correct']} of {result['answers']} ({_share(result, of_all)} of the correct)"
