"""A corpus: filtered rows, the number left after each filter, and the first ones left out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.prompts import turns_of
from sage_unsloth.runs.text import printable

NUM_EXAMPLES = 3  # rows of each filter that are shown
MAX_LETTERS = 60  # letters of their problems
PROVENANCE_NAMES = ("file", "hub_id", "config", "split", "embedded", "package", "task")
"""Keys of a provenance that name the data."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows for a stage.

    Attributes:
        rows: dicts with `problem` and `answer`, for SFT also `solution`; in source order.
        counts: rows left after each filter, in order.
        provenance: hub id and revision, or file and digest.
        columns: of custom data: role -> column.
        left_out: the problems of the first `NUM_EXAMPLES` rows that each filter left out.
    """

    rows: list[dict]
    counts: dict[str, int]
    provenance: dict
    left_out: dict[str, list[str]] = field(default_factory=dict)
    checker: Checker = MATH
    columns: dict[str, str] = field(default_factory=dict)

    def record(self, source: str | Path | None = None) -> dict[str, Any]:
        """The data entry of `run.json`: provenance, columns, counts, and the path of a file
        `source`.
        """
        path = {}
        if source is not None and "file" in self.provenance:
            path = {"path": str(Path(source).absolute())}
        columns = {"columns": dict(self.columns)} if self.columns else {}
        return path | self.provenance | columns | {"filters": dict(self.counts)}

    def origin(self) -> str:
        """The origin of the rows, on one line."""
        there = self.record()
        named = [f"{there[name]}" for name in PROVENANCE_NAMES if there.get(name)]
        parts = [", ".join(printable(text) for text in named)]
        parts += [
            f"{name} {str(there[name])[:12]}" for name in ("revision", "sha256") if there.get(name)
        ]
        if "columns" in there:
            parts.append(", ".join(f"{name}={of}" for name, of in there["columns"].items()))
        return f"Data: {printable('; '.join(parts))}"

    def table(self) -> list[dict]:
        return [{"filter": name, "rows left": f"{count:,}"} for name, count in self.counts.items()]

    def repeated(self) -> str:
        """A note on questions that occur in several rows; empty without any."""
        answers: dict[str, set[str]] = {}
        for row in self.rows:
            requested = json.dumps(turns_of(row))
            answers.setdefault(requested, set()).add(str(row.get("answer")))
        more = len(self.rows) - len(answers)
        if not more:
            return ""
        text = f"Duplicate questions: {more:,} of {len(self.rows):,} rows repeat that of another"
        if other := sum(len(result) > 1 for result in answers.values()):
            text += f", {other:,} questions have different answers, of which one at most is right"
        return f"{text}."

    def named(self) -> str:
        """The first rows that each filter left out, a line per filter; may be empty."""
        return "\n".join(
            f"left out by {name}, the first: "
            + ", ".join(
                repr(shorten(printable(text), MAX_LETTERS, placeholder=" …")) for text in texts
            )
            for name, texts in self.left_out.items()
        )


@dataclass
class Filters:
    """The rows so far; see `Corpus`."""

    counts: dict[str, int]
    left_out: dict[str, list[str]]

    def first(self, rows: list[dict], limit: int | None) -> list[dict]:
        """The first `limit` rows, counted; all for None."""
        if limit is None:
            return rows
        self.counts[f"first {limit:,}"] = len(rows[:limit])
        return rows[:limit]

    def keep_by(self, rows: list[dict], selected: Mapping[str, Sequence[bool]]) -> list[dict]:
        """The rows that pass every filter, each a list over all rows."""
        left = list(range(len(rows)))
        for name, good in selected.items():
            self.keep([rows[i] for i in left], [good[i] for i in left], name)
            left = [i for i in left if good[i]]
        return [rows[i] for i in left]

    def keep(self, rows: list[dict], good: Sequence[bool], name: str) -> list[dict]:
        """The good rows, counted; records the problems of the first others."""
        gone = [row["problem"] for row, passes in zip(rows, good, strict=True) if not passes]
        if gone:
            self.left_out[name] = gone[:NUM_EXAMPLES]
        selected = [row for row, passes in zip(rows, good, strict=True) if passes]
        self.counts[name] = len(selected)
        return selected


def check_limit(limit: int | None) -> None:
    """Raises ValueError for a limit below 1."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1, got {limit}. Leave --limit out, or give more")


def corpus_of(rows: list[dict], filters: Filters, provenance: dict) -> Corpus:
    """The corpus of these rows; ValueError if there are none."""
    counts = filters.counts
    if not rows:
        left = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
        last = next((name for name, count in counts.items() if not count), "rows")
        remedy = f"See what {last!r} asks, name another column (--columns), or give other data"
        if last.endswith(" tokens"):
            remedy = (
                "Raise the length limit (--max-length of sft, --max-prompt-length of "
                "train), or give other data"
            )
        raise ValueError(f"at least one row must pass every filter, got none ({left}). {remedy}")
    return Corpus(rows=rows, counts=counts, provenance=provenance, left_out=filters.left_out)
