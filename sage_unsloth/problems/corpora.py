"""Training rows: OpenMathReasoning-mini for SFT, DAPO-Math-17K for RL, the embedded arithmetic,
reasoning-gym tasks, or custom data (`own_data`).

The two data sets come from the hub, or from a local file with the hub's columns (`path=`). A
malformed row (a missing column, a problem that is not text) makes the whole file an error; a row
that fails a filter (too long, no answer) is left out. The rows left after each filter are counted.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.checkers import REASONING_GYM
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.mathematics import MATH, normalise, plain_number
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.corpus import Corpus, Filters, check_limit, make_corpus
from sage_unsloth.problems.gradable import gradable, references_are_answers
from sage_unsloth.problems.gradable import gradable_answers as gradable_answers
from sage_unsloth.problems.gym import GYM_PREFIX, training_rows
from sage_unsloth.problems.held_out import spread
from sage_unsloth.problems.own_data import read_own
from sage_unsloth.problems.sources import Source, check_columns, read_source
from sage_unsloth.prompts import (
    PROJECT_PROMPT,
    PromptFormat,
    render_prompt,
    render_solution,
    row_messages,
    taught_tokens,
)

OPEN_MATH_REASONING = Source(hub_id="unsloth/OpenMathReasoning-mini", split="cot", num_rows=19_252)
DAPO_MATH = Source(
    hub_id="open-r1/DAPO-Math-17k-Processed", config="en", split="train", num_rows=14_116
)
RL_ROWS = 2_000  # Table 8 takes the first 2,000
SFT_DATA = ("openmath", "arithmetic")
RL_DATA = ("dapo", "arithmetic")
LOOKED_AT = 32
"""Number of rows whose answers are graded against themselves before SFT."""
THINK_TAGS = ("<think>", "</think>")


logger = logging.getLogger(__name__)


def sft_corpus(
    tokenizer: Any,
    max_length: int,
    *,
    data: str = "openmath",
    path: str | Path | None = None,
    source: Corpus | None = None,
    prompt: PromptFormat = PROJECT_PROMPT,
) -> Corpus:
    """Worked solutions with a plain number as answer that fit, EOS included.

    A row of OpenMathReasoning-mini is used if its answer is a plainly written number, its prompt
    has at most `max_length` / 2 tokens, and prompt, solution and EOS together at most `max_length`.
    The authors limit the whole row to half of that, which leaves about 59 of 19,252 rows; their
    filter is `max_length=1024` here.

    Args:
        max_length: tokens of prompt and solution together.
        data: "openmath" or "arithmetic".
        source: the result of `sft_rows` for `data` and `path`; None calls it.
        prompt: defines the tags of the solutions.

    Raises:
        ValueError: unknown `data`, an unreadable source, a missing column, or no row is left (with
            the counts).
    """
    source = source or sft_rows(data=data, path=path)
    rows = source.rows
    filters = Filters(dict(source.counts), dict(source.left_out))
    prompts = _lengths(tokenizer, [render_prompt(tokenizer, row_messages(row)) for row in rows])
    fits = [2 * length <= max_length for length in prompts]
    rows = filters.keep(rows, fits, f"prompt <= {max_length // 2:,} tokens")
    texts = [render_solution(tokenizer, row_messages(row), prompt.taught(row)) for row in rows]
    # Tokenized in two parts, as it is taught, a row may be a few tokens longer.
    fits = [
        length <= max_length - 8
        or (
            length <= max_length
            and len(taught_tokens(tokenizer, row, prompt)["input_ids"]) <= max_length
        )
        for row, length in zip(rows, _lengths(tokenizer, texts), strict=True)
    ]
    rows = filters.keep(rows, fits, f"whole row <= {max_length:,} tokens")
    return replace(make_corpus(rows, filters, source.provenance), columns=source.columns)


def sft_rows(
    *,
    data: str = "openmath",
    path: str | Path | None = None,
    limit: int | None = None,
    columns: Columns | None = None,
    prompt: PromptFormat = PROJECT_PROMPT,
    verifier: Checker | None = None,
) -> Corpus:
    """`sft_corpus` before its filters by length, which need a tokenizer.

    Args:
        data: a name of `SFT_DATA`; or a custom file, or OWNER/NAME[:CONFIG] of the hub, with worked
            solutions and, optionally, answers.
        path: a local copy of OpenMathReasoning-mini; with `columns`, a custom file.
        limit: read the first N rows of the source; None reads all.
        prompt: defines the tags around a solution, if there is an answer to put between them.
        verifier: None is mathematics. If its golds are not answers (tests of a program, a pattern),
            solutions are used as they are.

    Raises:
        ValueError: unknown `data`, an unreadable source, a missing column, answers that mathematics
            cannot grade without another verifier, or no row is left.
    """
    check_limit(limit)
    data, path, columns = _resolve_source(data, path, columns, SFT_DATA)
    if data.startswith(GYM_PREFIX):
        raise ValueError(
            f"SFT needs worked solutions, which reasoning-gym does not have, got {data}. Use "
            "train, or a file with a column `solution`"
        )
    if data not in SFT_DATA:
        return _own_sft_rows(data, columns, prompt, verifier, limit)
    if data == "arithmetic":
        rows, provenance = arithmetic.problems("sft"), {"embedded": "arithmetic, split sft"}
        filters = Filters({"rows": len(rows)}, {})
        rows = filters.first(rows, limit)
    else:
        rows, provenance = read_source(OPEN_MATH_REASONING, path)
        filters = Filters({"rows": len(rows)}, {})
        rows = filters.first(rows, limit)
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
    return make_corpus(rows, filters, provenance)


def rl_corpus(
    tokenizer: Any,
    max_prompt_length: int,
    *,
    data: str = "dapo",
    path: str | Path | None = None,
    limit: int | None = None,
    source: Corpus | None = None,
) -> Corpus:
    """Rows with an answer that can be graded and a prompt that fits.

    Args:
        max_prompt_length: tokens.
        data: "dapo" or "arithmetic".
        limit: read the first N rows of the source; None reads all, of dapo the paper's `RL_ROWS`.
        source: the result of `rl_rows` for `data`, `path` and `limit`; None calls it.

    Raises:
        ValueError: unknown `data`, an unreadable source, a missing column, an empty or non-text
            problem or answer, or no row is left (with the counts).
    """
    source = source or rl_rows(data=data, path=path, limit=limit)
    rows = source.rows
    filters = Filters(dict(source.counts), dict(source.left_out))
    lengths = _lengths(tokenizer, [render_prompt(tokenizer, row_messages(row)) for row in rows])
    fits = [length <= max_prompt_length for length in lengths]
    rows = filters.keep(rows, fits, f"prompt <= {max_prompt_length:,} tokens")
    corpus = make_corpus(rows, filters, source.provenance)
    return replace(corpus, checker=source.checker, columns=source.columns)


def rl_rows(
    *,
    data: str = "dapo",
    path: str | Path | None = None,
    limit: int | None = None,
    columns: Columns | None = None,
    verifier: Checker | None = None,
    answered: bool = True,
) -> Corpus:
    """`rl_corpus` before its filter by length, which needs a tokenizer.

    Args:
        data: a name of `RL_DATA`, `reasoning-gym:TASK`; or a custom file, or OWNER/NAME[:CONFIG] of
            the hub.
        path: a local copy of DAPO-Math-17k-Processed; with `columns`, a custom file.
        limit: see `rl_corpus`.
        verifier: None takes the default of the data: reasoning-gym's own scorer for its tasks,
            mathematics for all others.
        answered: rows need an answer; False for custom rewards without one.

    Raises:
        ValueError: as `rl_corpus`.
    """
    check_limit(limit)
    data, path, columns = _resolve_source(data, path, columns, RL_DATA)
    selected: dict[str, list[bool]] = {}
    read: dict[str, str] = {}
    if data == "arithmetic":
        rows, provenance = arithmetic.problems("train"), {"embedded": "arithmetic, split train"}
    elif data == "dapo":
        rows, provenance = read_source(DAPO_MATH, path)
        limit = limit or RL_ROWS
        check_columns(rows, ("prompt", "solution"))
        rows = [{"problem": row["prompt"], "answer": row["solution"].strip()} for row in rows]
    elif data.startswith(GYM_PREFIX):
        rows, selected, provenance = training_rows(
            data, limit or RL_ROWS, verifier in (None, REASONING_GYM)
        )
        verifier = verifier or REASONING_GYM
    else:
        where = {"needed" if answered else "optional": ("answer",)}
        own = read_own(data, columns, **({"needed": ()} | where), split="train")
        rows, selected, provenance, read = own.rows, own.filters, own.provenance, own.columns
    checker = verifier or MATH
    filters = Filters({"rows": len(rows)}, {})
    rows = filters.first(rows, limit)
    rows = filters.apply_filters(rows, {name: good[:limit] for name, good in selected.items()})
    if answered:
        good = gradable(rows, checker)
        if rows and not any(good):
            raise ValueError(
                f"the verifier {checker.name} can use none of the answers in {len(rows):,} rows of "
                f"{data}, the first is {rows[0]['answer']!r:.200}. Use the answer out of it by "
                "--answer-pattern, or choose another column or verifier"
            )
        rows = filters.keep(rows, good, "answer can be graded")
    return replace(make_corpus(rows, filters, provenance), checker=checker, columns=read)


def _resolve_source(
    data: str, path: str | Path | None, columns: Columns | None, names: Sequence[str]
) -> tuple[str, str | Path | None, Columns]:
    """What to read: a known name with its local file, or custom data.

    Raises:
        ValueError: two sources at once, or columns for a known data set.
    """
    columns = columns or Columns()
    if path is not None and data not in names:
        raise ValueError(f"give either --data or --path, got {data} and {path}")
    if path is not None and columns:
        return str(path), None, columns
    if columns and (data in names or data.startswith(GYM_PREFIX)):
        raise ValueError(
            f"{data} has columns of its own, got --columns, --answer-pattern or --split with it. "
            "Leave these out, or give --data FILE for a data set of your own"
        )
    own = "/" in data or "." in data or data.startswith(GYM_PREFIX)
    if data not in names and not own and not Path(data).exists():
        raise ValueError(
            f"data must be one of {', '.join(names)}, reasoning-gym:TASK, a file, or OWNER/NAME of "
            f"the hub, got {data!r}, which is not a file"
        )
    return data, path, columns


def _own_sft_rows(
    data: str,
    columns: Columns,
    prompt: PromptFormat,
    verifier: Checker | None,
    limit: int | None,
) -> Corpus:
    """Rows with a worked solution and, if the data set has answers, an answer each.

    A solution with an answer is written between the tags, and left out if it would not be read as
    that answer (it contains a tag or a box). Without answers it is used as it is.
    """
    result = read_own(data, columns, ("solution",), optional=("answer",), split="train")
    filters = Filters({"rows": len(result.rows)}, {})
    selected = {name: good[:limit] for name, good in result.filters.items()}
    rows = filters.apply_filters(filters.first(result.rows, limit), selected)
    if any("answer" in row for row in rows):
        rows = filters.keep(rows, [bool(row["answer"]) for row in rows], "has an answer")
        if not _teaches_answers(rows, data, verifier):
            rows = [{name: row[name] for name in row if name != "answer"} for row in rows]
    if any("answer" in row for row in rows):
        rows = [row | {"solution": without_think_tags(row["solution"])} for row in rows]
        read = [extract_answer(prompt.taught(row), prompt=prompt) == row["answer"] for row in rows]
        rows = filters.keep(rows, read, "the answer is read from the taught text")
    return replace(make_corpus(rows, filters, result.provenance), columns=result.columns)


def _teaches_answers(rows: Sequence[dict], data: str, verifier: Checker | None) -> bool:
    """Whether the answers of rows go between the tags, judged from some of them.

    Raises:
        ValueError: mathematics can grade none of them, and no other verifier was given.
    """
    some = spread(rows, min(len(rows), LOOKED_AT))
    if not some or references_are_answers(some, verifier or MATH):
        return True
    if verifier is None:
        raise ValueError(
            f"SFT needs answers that math can grade, but none of {len(some)} rows of {data} has "
            f"one, the first is {some[0]['answer']!r:.200}. Name what grades them (--verifier "
            "text, say), or choose another column"
        )
    logger.info(
        "The references of the verifier %s are not answers, so solutions are taught as they are.",
        verifier.name,
    )
    return False


def without_think_tags(solution: str) -> str:
    """The reasoning without its tags; the project's own tags replace them."""
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
