"""How answers reach their grade, by kind of comparison: a kind that suddenly grows is a reward that
is being gamed, or a format that drifts.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.analysis.sources import Sources
from sage_unsloth.figures import show_table
from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.runs.files import read_jsonl, write_text
from sage_unsloth.runs.text import file_name, printable
from sage_unsloth.sampling.kinds import UNKNOWN, correct_shares, count_kinds, kind_of
from sage_unsloth.training.stage import COMPLETIONS

THIRDS = ("first third", "middle third", "last third")
GROWTH, LEAST = 2.0, 0.05
"""A kind has grown if its share of the right answers is so many times what it was in the first
third of a run, and at least so much more."""
SHOWN, LONGEST = 5, 300  # completions on the terminal, and characters of each

logger = logging.getLogger(__name__)


def check_kind(kind: str) -> None:
    """Raises ValueError for what is no kind."""
    known = (*Kind, UNKNOWN)
    if kind not in known:
        raise ValueError(f"--kind must be one of {', '.join(known)}, got {kind!r}")


def of_samples(benchmark: str, samples: Mapping[str, Sequence[dict]]) -> dict[str, Any]:
    """model -> `count_kinds` of its records; shown as a table."""
    counts = {model: count_kinds(records) for model, records in samples.items()}
    show_table(
        [
            {"model": model, "kind": kind} | result | {"of the right": _share(result, of_model)}
            for model, of_model in counts.items()
            for kind, result in of_model.items()
        ],
        f"{benchmark}: how answers reached their grade (--kind KIND writes the completions)",
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
                "%s: answers that are right as %s were %.0f %% of the right ones in the first "
                "third of the logged steps and are %.0f %% in the last. Look at them: python -m "
                "sage_unsloth analyze %s --kind %r",
                *(name, kind, 100 * before, 100 * now, folder, kind),
            )
    if rows:
        show_table(rows, "Rollouts: right answers by kind of comparison, of those so compared")
    return counts


def grown(thirds: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, tuple[float, float]]:
    """kind -> share of the right answers in the first and last third, of kinds that have grown by
    `GROWTH` and `LEAST`.
    """
    if THIRDS[0] not in thirds or THIRDS[-1] not in thirds:
        return {}
    before, now = (correct_shares(thirds[part]) for part in (THIRDS[0], THIRDS[-1]))
    if not before:  # nothing was right, so everything that is right now has grown
        return {}
    return {
        kind: (before.get(kind, 0.0), share)
        for kind, share in now.items()
        if share >= GROWTH * before.get(kind, 0.0) and share >= before.get(kind, 0.0) + LEAST
    }


def write_completions(sources: Sources, kind: str, out: Path) -> dict[str, Any]:
    """Writes every completion whose answer was compared as `kind`, right ones first within each
    source, and shows the last right ones.

    Returns:
        `file`, and how many `completions` it holds.
    """
    rows = [
        row
        for part in _sources_of(sources)
        for row in sorted(part, key=lambda row: row["grade"] != Grade.CORRECT)
        if kind_of(row) == kind
    ]
    file = out / f"kind_{file_name(kind).replace(' ', '_')}.jsonl"
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    right = [row for row in rows if row["grade"] == Grade.CORRECT]
    print(f"\n{len(rows):,} completions compared as {kind}, {len(right):,} of them right: {file}")
    for row in right[-SHOWN:]:
        gold = row.get("gold", row.get("answer"))
        where = ", ".join(
            f"{name} {row[name]}"
            for name in ("run", "model", "step", "problem_id", "sample")
            if name in row
        )
        text = row["completion"]
        text = text if len(text) <= LONGEST else "…" + text[-LONGEST:]
        print(printable(f"- {where}: {row.get('extracted')!r} for {gold!r}: {text!r}"))
    return {"file": str(file), "completions": len(rows), "correct": len(right)}


def _sources_of(sources: Sources) -> Iterator[list[dict]]:
    for models in sources.samples.values():
        yield from ([dict(record) for record in records] for records in models.values())
    for name, folder in sources.runs.items():
        yield [{"run": name} | row for row in _rollouts(folder)]


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
    return f"{result['correct']} of {result['answers']} ({_share(result, of_all)} of the right)"
