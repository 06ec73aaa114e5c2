"""Rows of a custom data set, from a file or from the hub, by the roles of its columns."""

import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sage_unsloth.problems.columns import Columns, find_columns
from sage_unsloth.problems.sources import SUFFIXES, Source, read_source
from sage_unsloth.runs.text import printable

logger = logging.getLogger(__name__)

MESSAGE_ROLES = ("system", "user", "assistant")
OTHER_KINDS = (".tsv", ".xls", ".txt", ".gz", ".zip", ".zst", ".arrow", ".xlsx", ".xml", ".yaml")
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?")


@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """The rows of a custom data set.

    Attributes:
        rows: `problem` (the last user turn of a conversation), `messages`, `answer`, `solution` and
            other names, if they have columns.
        filters: description -> whether each source row passes. `rows` has all rows, so that those
            left out can be listed.
        provenance: hub id and revision, or file and digest; and the named columns.
    """

    rows: list[dict]
    filters: dict[str, list[bool]]
    provenance: dict
    columns: dict[str, str]


def find_source(data: str, split: str) -> tuple[Source, Path | None]:
    """A file, or a hub data set, OWNER/NAME or OWNER/NAME:CONFIG; ValueError for neither."""
    path = Path(data)
    if path.is_dir():
        raise ValueError(f"data must be a file or a hub id, but {data} is a folder")
    spelled = data.startswith((".", "/", "~")) or path.suffix in (*SUFFIXES, *OTHER_KINDS)
    if path.is_file() or spelled:
        return Source(hub_id="", split=""), path
    match = _HUB_ID.fullmatch(data)
    if match is None:
        raise ValueError(
            "data must be a file, a hub id (OWNER/NAME or OWNER/NAME:CONFIG), reasoning-gym:TASK, "
            f"or a name that this package knows, got {data!r}, which is not a file"
        )
    return Source(hub_id=match["id"], config=match["config"], split=split), None


def read_own(
    data: str, columns: Columns, needed: Sequence[str], *, split: str, optional: Sequence[str] = ()
) -> OwnRows:
    """The rows of a file or of a hub data set, by the roles of their columns.

    Args:
        data: see `find_source`.
        needed: required roles besides the problem: `answer`, `solution`.
        split: of the hub, unless `columns` has one.
        optional: roles that are found by name and may be missing.

    Raises:
        ValueError: no rows, a missing column (with the existing ones), a problem that is not text,
            values of mixed types, or a pattern that never matches.
    """
    raw, provenance = read_raw(data, columns, split)
    own = read_columns(raw, columns, needed, data, optional=optional)
    return replace(own, provenance=provenance)


def read_raw(data: str, columns: Columns, split: str) -> tuple[list[dict], dict]:
    """The non-empty rows as they are, and their provenance."""
    source, path = find_source(data, columns.split or split)
    if path is not None and columns.split is not None:
        raise ValueError(
            f"a split is for data of the hub, got --split {columns.split} with the file {path}"
        )
    raw, provenance = read_source(source, path)
    if not raw:
        raise ValueError(
            f"data must have rows, but {data} has none (.jsonl: one object a line, .json: a list "
            "of objects)"
        )
    how = {"columns": dict(columns.names)} if columns.names else {}
    how |= {"answer_pattern": columns.answer_pattern} if columns.answer_pattern else {}
    return raw, provenance | how


def read_columns(
    raw: Sequence[dict],
    columns: Columns,
    needed: Sequence[str],
    data: str,
    *,
    optional: Sequence[str] = (),
) -> OwnRows:
    """`read_own` on rows that are already read; `data` is their name in messages."""
    places = find_columns(raw, columns, needed, data, optional)
    requested = "messages" if "messages" in places else "problem"
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(raw):
        value = row.get(places[requested])
        where = f"row {number} of {data}, column {places[requested]!r},"
        rows.append(
            _conversation(value, where) if requested == "messages" else _problem(value, where)
        )
    selected: dict[str, list[bool]] = {}
    for name in ("answer", "solution"):
        if name in places and name in (*needed, *optional):
            texts = _texts(raw, places[name], data)
            if columns.answer_pattern is not None and name == "answer":
                result = _last_matches(texts, columns.answer_pattern, data)
                selected["answer pattern matches"] = [match is not None for match in result]
                answers = ["" if match is None else match[1].strip() for match in result]
            elif columns.answer_pattern is not None and places.get("answer") == places[name]:
                answers = [_without_match(text, columns.answer_pattern) for text in texts]
            else:
                answers = texts
            own_reply = name == "solution" and name not in columns.names
            for row, text in zip(rows, answers, strict=True):
                row[name] = (own_reply and row.get("replied")) or text
        if name == "solution" and name in needed and "messages" in places:
            for row in rows:  # a conversation that ends in its solution
                row.setdefault(name, row.pop("replied", ""))
        if name in needed:
            selected[f"has {'an' if name == 'answer' else 'a'} {name}"] = [
                bool(row[name]) for row in rows
            ]
    for row in rows:
        row.pop("replied", None)
    for name, column in columns.names.items():
        if name not in row_names(needed, optional):
            for number, (row, source) in enumerate(zip(rows, raw, strict=True)):
                row[name] = _json_value(source.get(column), f"row {number} of {data}, {column!r},")
    read = row_names(needed, optional) | columns.names.keys()
    places = {name: column for name, column in places.items() if name in read}
    return OwnRows(rows=rows, filters=selected, provenance={}, columns=places)


def row_names(needed: Sequence[str], optional: Sequence[str]) -> set[str]:
    """Roles with their own rules; other names are copied."""
    return {"problem", "messages", "answer", *needed, *optional}


def _problem(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        raise ValueError(
            f"a problem must be text, but {where} has a conversation. Give it as messages "
            "(--columns messages=COLUMN)"
        )
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"a problem must be non-empty text, but {where} has {value!r:.100}")
    _check_encodes(value, where)
    return {"problem": value}


def _check_encodes(text: str, where: str) -> None:
    """Raises ValueError for half of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must be Unicode, but {where} has half of a character, "
            f"{error.object[error.start]!r}. Correct or drop that row"
        ) from error


def _conversation(value: Any, where: str) -> dict[str, Any]:
    """A conversation up to the turn to be answered, and its answer, if any."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of turns, but {where} has {value!r:.100}")
    for turn in value:
        good = isinstance(turn, dict) and isinstance(turn.get("content"), str)
        if not good or turn.get("role") not in MESSAGE_ROLES:
            raise ValueError(
                "a turn must have a `role` (system, user or assistant) and a `content` of text, "
                f"but {where} has {turn!r:.150}. Write the turns in that form"
            )
        _check_encodes(turn["content"], where)
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in value]
    replied = turns.pop()["content"] if turns[-1]["role"] == "assistant" else None
    if not turns or turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
        raise ValueError(
            "a conversation must end in a user's turn or in the assistant's answer to it, but "
            f"{where} ends otherwise"
        )
    if any(turn["role"] == "system" for turn in turns[1:]):
        raise ValueError(f"a system turn must be the first, but {where} has a later one")
    row: dict[str, Any] = {"problem": turns[-1]["content"], "messages": turns}
    return row if replied is None else row | {"replied": replied.strip()}


def _texts(raw: Sequence[dict], column: str, data: str) -> list[str]:
    """A column by `cell_text`."""
    values = [row.get(column) for row in raw]
    kinds: dict[str, int] = {}
    for number, value in enumerate(values):
        kind = _kind(value)
        if kind != "nothing":
            kinds.setdefault(kind, number)
    if len(kinds) > 1:
        given = " and ".join(
            f"{kind} (row {number}: {values[number]!r:.60})" for kind, number in kinds.items()
        )
        raise ValueError(
            f"a column must hold values of one kind, but {column!r} of {data} has {given}"
        )
    if "values of another kind" in kinds:
        number = kinds["values of another kind"]
        raise ValueError(
            f"an answer must be text, a number, a list or an object, but {column!r} of {data} has "
            f"{values[number]!r:.60} in row {number}"
        )
    whole = next((v for v in values if isinstance(v, float) and v.is_integer()), None)
    if whole is not None:  # as a column of a table has them, where others have a fraction
        logger.info(
            "%r of %s has numbers such as %s, which are written as whole numbers: %d.",
            column,
            data,
            whole,
            whole,
        )
    texts = [cell_text(value) for value in values]
    for number, text in enumerate(texts):
        _check_encodes(text, f"row {number} of {data}, column {column!r},")
    return texts


def _kind(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "nothing"
    if isinstance(value, bool):
        return "yes or no"
    if isinstance(value, (str, int, float)):
        return "text or numbers"
    return "lists or objects" if isinstance(value, (list, dict)) else "values of another kind"


def cell_text(value: Any) -> str:
    """A value as text: numbers as written, lists and objects as JSON, "" for nothing."""
    if isinstance(value, str):
        return value.strip()
    if _kind(value) == "nothing":
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def _last_matches(texts: Sequence[str], pattern: str, data: str) -> list[re.Match[str] | None]:
    """The last match in each text; an unmatched group is None."""
    compiled = re.compile(pattern)
    results = []
    for text in texts:
        matches = [match for match in compiled.finditer(text) if (match[1] or "").strip()]
        results.append(matches[-1] if matches else None)
    if not any(results):
        example = printable(texts[0])
        shown = example if len(example) <= 120 else f"… {example[-120:]}"
        raise ValueError(
            f"--answer-pattern must match answers, but {pattern!r} matches 0 % of the "
            f"{len(texts):,} rows of {data}, of which the first is {shown!r}"
        )
    return results


def _without_match(text: str, pattern: str) -> str:
    """A worked text without its final answer, which SFT writes between the tags."""
    matches = [match for match in re.finditer(pattern, text) if (match[1] or "").strip()]
    if not matches:
        return text
    return (text[: matches[-1].start()].rstrip() + text[matches[-1].end() :]).strip()


def _json_value(value: Any, where: str) -> Any:
    """A value for rewards as JSON; dates and decimals become text."""
    try:
        json.dumps(value, allow_nan=True)
    except (TypeError, ValueError):
        if isinstance(value, (bytes, list, dict, set)):
            raise ValueError(
                f"a column must hold what JSON can, but {where} has {value!r:.60}. Leave it out, "
                "or convert it"
            ) from None
        return str(value)
    return value
