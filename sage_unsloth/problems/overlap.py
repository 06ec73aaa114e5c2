"""Finds problems of a benchmark in a training set, word for word."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.problems.columns import FOUND_BY_NAME, Columns, find_columns
from sage_unsloth.problems.own_data import read_columns
from sage_unsloth.problems.sources import read_file


def training_problems(path: str | Path) -> list[dict]:
    """The rows of a training set's file, with `problem` found as by `train --data`.

    For a conversation, `problem` is its last user turn.

    Args:
        path: .jsonl, .json, .parquet or .csv.

    Raises:
        ValueError: a missing or empty file, or no column with problems or conversations.
    """
    try:
        rows = read_file(path)
        if not rows:
            raise ValueError(f"a training set must have rows, but {path} has none")
        _check_has_problems(rows, path)
        return read_columns(rows, Columns(), (), str(path)).rows
    except ValueError as error:
        raise ValueError(f"--train FILE: {error}") from error


def _check_has_problems(rows: Sequence[dict], path: str | Path) -> None:
    try:
        find_columns(rows, Columns(), (), str(path), ())
    except ValueError:
        texts, turns = (", ".join(FOUND_BY_NAME[name]) for name in ("problem", "messages"))
        raise ValueError(
            f"a training set needs a column with its problems, as text ({texts}) or as turns "
            f"({turns}), but {path} has {', '.join(dict.fromkeys(k for row in rows for k in row))}"
        ) from None


def overlap(
    training: Sequence[Mapping[str, Any]], benchmark: Benchmark, n: int = 8
) -> list[dict[str, Any]]:
    """The benchmark's problems that share n consecutive words with a training problem.

    Words are runs of letters and digits in lower case. A problem shorter than n words counts if all
    of it is in a training problem.

    Args:
        training: rows with `problem`.

    Returns:
        A row for each: `id`; `shared`, the share of the problem's n-grams found; and `words`, the
            first one found.
    """
    if n < 1:
        raise ValueError(f"n must be >= 1 word, got {n}")
    words = {row["id"]: re.findall(r"\w+", row["problem"].lower()) for row in benchmark.rows}
    lengths = {min(n, len(result)) for result in words.values()} - {0}
    seen: set[tuple[str, ...]] = set()
    for row in training:
        text = re.findall(r"\w+", row["problem"].lower())
        for length in lengths:
            seen.update(_grams(text, length))
    results = []
    for row_id, text in words.items():
        grams = _grams(text, min(n, len(text))) if text else []
        shared = [gram for gram in grams if gram in seen]
        if shared:
            results.append(
                {"id": row_id, "shared": len(shared) / len(grams), "words": " ".join(shared[0])}
            )
    return results


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))
