"""Training rows: OpenMathReasoning-mini for SFT, DAPO-Math-17K for RL, or the embedded arithmetic.

Both data sets come from the hub, or from a local file with the hub's columns (`path=`). Where a row
is malformed (a missing column, a value that is no text) the whole file is refused; where it fails
a filter (too long, no numeric answer) it is left out. The rows left after each filter are counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import normalise, only_its_text, plain_number
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.sources import Source, check_columns, read_source
from sage_unsloth.prompts import (
    PROJECT_PROMPT,
    PromptFormat,
    render_prompt,
    render_solution,
    turns_of,
)
from sage_unsloth.runs.text import printable

OPEN_MATH_REASONING = Source(hub_id="unsloth/OpenMathReasoning-mini", split="cot", num_rows=19_252)
DAPO_MATH = Source(
    hub_id="open-r1/DAPO-Math-17k-Processed", config="en", split="train", num_rows=14_116
)
RL_ROWS = 2_000  # Table 8 takes the first 2,000
SFT_DATA = ("openmath", "arithmetic")
RL_DATA = ("dapo", "arithmetic")
NAMED = 3  # rows of each filter that are shown
SHOWN = 60  # letters of their problems
THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows ready for a stage.

    Attributes:
        rows: dicts with `problem` and `answer`, for SFT also `solution`; in the order of the
            source.
        counts: rows left after each filter, in order.
        provenance: where the rows are from: hub id and revision, or file and digest.
        left_out: the problems of the first `NAMED` rows that each filter left out.
    """

    rows: list[dict]
    counts: dict[str, int]
    provenance: dict
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def table(self) -> list[dict]:
        """The counts as rows of a table."""
        return [{"filter": name, "rows left": f"{count:,}"} for name, count in self.counts.items()]

    def named(self) -> str:
        """The first rows that each filter left out, a line for each filter; empty for none."""
        return "\n".join(
            f"left out by {name}, the first: "
            + ", ".join(repr(shorten(printable(text), SHOWN, placeholder=" …")) for text in texts)
            for name, texts in self.left_out.items()
        )


def sft_corpus(
    tokenizer: Any,
    max_length: int,
    *,
    data: str = "openmath",
    path: str | Path | None = None,
    limit: int | None = None,
    found: Corpus | None = None,
    prompt: PromptFormat = PROJECT_PROMPT,
) -> Corpus:
    """Worked solutions whose answer is a number and which fit, EOS included.

    A row of OpenMathReasoning-mini is kept where its answer is a plainly written number, its prompt
    has at most `max_length` / 2 tokens, and prompt, solution and EOS together have at most
    `max_length`. The authors ask for half of that of the whole row, which leaves about 59 rows of
    19,252; their filter is `max_length=1024` here.

    Args:
        tokenizer: counts the tokens.
        max_length: tokens of prompt and solution together.
        data: "openmath" or "arithmetic".
        path: a local copy of OpenMathReasoning-mini.
        limit: keep the first so many of the rows that pass; None keeps all.
        found: what `sft_rows` gave for `data` and `path`; None calls it.
        prompt: the tags that the solutions are taught with.

    Raises:
        ValueError: unknown `data`, an unreadable source, a missing column, or no row is left (with
            the counts).
    """
    found = found or sft_rows(data=data, path=path)
    rows = found.rows
    filters = _Filters(dict(found.counts), dict(found.left_out))
    prompts = _lengths(tokenizer, [render_prompt(tokenizer, turns_of(row)) for row in rows])
    fits = [2 * length <= max_length for length in prompts]
    rows = filters.keep(rows, fits, f"prompt <= {max_length // 2:,} tokens")
    texts = [render_solution(tokenizer, turns_of(row), prompt.taught(row)) for row in rows]
    fits = [length <= max_length for length in _lengths(tokenizer, texts)]
    rows = filters.keep(rows, fits, f"whole row <= {max_length:,} tokens")
    return _limited(rows, filters, found.provenance, limit)


def sft_rows(*, data: str = "openmath", path: str | Path | None = None) -> Corpus:
    """`sft_corpus` before its filters by length, which alone need a tokenizer.

    Raises:
        ValueError: unknown `data`, an unreadable source, a missing column, or no row is left.
    """
    _check_choice("data", data, SFT_DATA)
    if data == "arithmetic":
        rows, provenance = arithmetic.problems("sft"), {"embedded": "arithmetic, split sft"}
        filters = _Filters({"rows": len(rows)}, {})
    else:
        rows, provenance = read_source(OPEN_MATH_REASONING, path)
        filters = _Filters({"rows": len(rows)}, {})
        filtered = ("generated_solution", "expected_answer")  # empty ones are left out below
        check_columns(rows, ("problem", *filtered), may_be_empty=filtered)
        rows = [
            {
                "problem": row["problem"],
                "solution": without_think_tags(row["generated_solution"]),
                "answer": row["expected_answer"].strip(),
            }
            for row in rows
        ]
        good = [_is_number(row["answer"]) and bool(row["solution"]) for row in rows]
        rows = filters.keep(rows, good, "numeric answer, some working")
    return _limited(rows, filters, provenance, None)


def rl_corpus(
    tokenizer: Any,
    max_prompt_length: int,
    *,
    data: str = "dapo",
    path: str | Path | None = None,
    limit: int | None = RL_ROWS,
    found: Corpus | None = None,
) -> Corpus:
    """Problems with an answer that can be verified.

    Of the first `limit` rows of the source, those whose answer can be graded and whose prompt fits.

    Args:
        tokenizer: counts the tokens.
        max_prompt_length: tokens.
        data: "dapo" or "arithmetic".
        path: a local copy of DAPO-Math-17k-Processed.
        limit: how many rows of the source are looked at; None looks at all.
        found: what `rl_rows` gave for `data`, `path` and `limit`; None calls it.

    Raises:
        ValueError: unknown `data`, an unreadable source, a missing column, a prompt or answer that
            is no text or empty, or no row is left (with the counts).
    """
    found = found or rl_rows(data=data, path=path, limit=limit)
    rows = found.rows
    filters = _Filters(dict(found.counts), dict(found.left_out))
    lengths = _lengths(tokenizer, [render_prompt(tokenizer, turns_of(row)) for row in rows])
    fits = [length <= max_prompt_length for length in lengths]
    rows = filters.keep(rows, fits, f"prompt <= {max_prompt_length:,} tokens")
    return _limited(rows, filters, found.provenance, None)


def rl_rows(
    *, data: str = "dapo", path: str | Path | None = None, limit: int | None = RL_ROWS
) -> Corpus:
    """`rl_corpus` before its filter by length, which alone needs a tokenizer.

    Raises:
        ValueError: as `rl_corpus`.
    """
    _check_choice("data", data, RL_DATA)
    if data == "arithmetic":
        rows, provenance = arithmetic.problems("train"), {"embedded": "arithmetic, split train"}
    else:
        rows, provenance = read_source(DAPO_MATH, path)
        check_columns(rows, ("prompt", "solution"))
        rows = [{"problem": row["prompt"], "answer": row["solution"].strip()} for row in rows]
    filters = _Filters({"rows": len(rows)}, {})
    if limit is not None:
        rows = rows[:limit]
        filters.counts[f"first {limit:,}"] = len(rows)
    gradable = gradable_answers(row["answer"] for row in rows)
    good = [row["answer"] in gradable for row in rows]
    rows = filters.keep(rows, good, "answer can be graded")
    return _limited(rows, filters, provenance, None)


def gradable_answers(answers: Iterable[str]) -> set[str]:
    """Those that are correct against themselves, in more than one writing.

    Any other would never be rewarded, or hardly ever.
    """
    answers = [answer for answer in set(answers) if answer.strip()]
    with Grader() as grader:
        verdicts = grader.judge_answers(answers, answers)
    return {
        answer
        for answer, verdict in zip(answers, verdicts, strict=True)
        if verdict.grade is Grade.CORRECT and not only_its_text(answer, verdict)
    }


def spread(rows: Sequence[dict], count: int) -> list[dict]:
    """`count` rows, evenly over the list."""
    return [rows[int(i * len(rows) / count)] for i in range(count)]


def hold_out(rows: Sequence[dict], count: int) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows).

    `count` rows, spread evenly over the list, are held out; rows with the same problems are left
    out of training.

    Raises:
        ValueError: fewer than one row would be left to train on.
    """
    if count == 0:
        return list(rows), []
    if not 0 < count < len(rows):
        raise ValueError(
            f"fewer rows must be held out than there are; got {count} of {len(rows)}; hold out "
            "fewer"
        )
    chosen = spread(rows, count)
    problems = {row["problem"] for row in chosen}
    training = [row for row in rows if row["problem"] not in problems]
    if not training:
        raise ValueError(
            f"{count} held-out rows must leave another problem to train on; the {len(rows)} rows "
            f"have {len(problems)} different problems; hold out fewer"
        )
    return training, [{"id": f"held-out-{i}"} | row for i, row in enumerate(chosen)]


def without_think_tags(solution: str) -> str:
    """The working out alone; in training it is put between the project's own tags."""
    for tag in THINK_TAGS:
        solution = solution.replace(tag, "")
    return solution.strip()


def _is_number(answer: str) -> bool:
    text = normalise(answer)
    return text is not None and plain_number(text) is not None


def _lengths(tokenizer: Any, texts: list[str]) -> list[int]:
    """Tokens of each text."""
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


@dataclass
class _Filters:
    """What filters have done so far: see `Corpus`."""

    counts: dict[str, int]
    left_out: dict[str, list[str]]

    def keep(self, rows: list[dict], good: Sequence[bool], name: str) -> list[dict]:
        """The good rows, counted; of the others the first are kept by their problems."""
        gone = [row["problem"] for row, passes in zip(rows, good, strict=True) if not passes]
        if gone:
            self.left_out[name] = gone[:NAMED]
        kept = [row for row, passes in zip(rows, good, strict=True) if passes]
        self.counts[name] = len(kept)
        return kept


def _limited(rows: list[dict], filters: _Filters, provenance: dict, limit: int | None) -> Corpus:
    """The corpus of the first `limit` rows; ValueError if there are none."""
    counts = filters.counts
    if limit is not None:
        rows = rows[:limit]
        counts[f"first {limit:,}"] = len(rows)
    if not rows:
        left = "; ".join(f"{name}: {count:,}" for name, count in counts.items())
        raise ValueError(
            f"at least one row must pass every filter; got none ({left}); raise the length "
            "limit, or give other data"
        )
    return Corpus(rows=rows, counts=counts, provenance=provenance, left_out=filters.left_out)
