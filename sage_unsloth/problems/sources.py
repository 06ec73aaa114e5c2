"""Reads data sets, from the hub at a pinned revision or from a local file with the hub's columns.

Nothing is interpreted here: `corpora` makes training rows, `benchmarks` problems to evaluate on.
"""

import csv
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The location of a data set on the hub.

    Attributes:
        hub_id: "owner/name".
        config: its configuration, None if there is only one.
        split: as the hub names it.
        revision: commit; None takes the newest, which the provenance records.
        num_rows: required rows of the split; None does not check.
    """

    hub_id: str
    config: str | None = None
    split: str
    revision: str | None = None
    num_rows: int | None = None


def read_source(source: Source, path: str | Path | None = None) -> tuple[list[dict], dict]:
    """The rows, and their provenance for `run.json`.

    Args:
        path: a local copy (one of `SUFFIXES`), whose number of rows is not checked; no network is
            used then.

    Raises:
        ValueError: the hub cannot be reached, another number of rows, or an unreadable file.
    """
    if path is not None:
        path = Path(path)
        rows = read_file(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return rows, {"file": path.name, "sha256": digest, "rows": len(rows)}
    rows, revision = _from_hub(source)
    if source.num_rows is not None and len(rows) != source.num_rows:
        raise ValueError(
            f"{source.hub_id} ({source.split}) must have {source.num_rows} rows, got {len(rows)} "
            f"at revision {revision}. Pin the revision that has them, or give path= with a copy"
        )
    return rows, {
        "hub_id": source.hub_id,
        "config": source.config,
        "split": source.split,
        "revision": revision,
        "rows": len(rows),
    }


def _from_hub(source: Source) -> tuple[list[dict], str | None]:
    """All rows of the split, and their commit."""
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        # A name that is not there is told in seconds, before anything is downloaded.
        revision = source.revision
        if revision is None and not HF_HUB_OFFLINE:  # offline a copy in the cache may do
            revision = HfApi().dataset_info(source.hub_id, timeout=10).sha
        data = load_dataset(source.hub_id, source.config, split=source.split, revision=revision)
    except Exception as error:
        # Hub, HTTP and offline errors have no common base class; the reader needs the remedy
        # whichever it is.
        raise ValueError(
            f"{source.hub_id} could not be read from the hub: {type(error).__name__}: "
            f"{error!s:.300}. Check the name and the network, or give a local copy in the same "
            f"columns ({', '.join(SUFFIXES)}, --path or path=)"
        ) from error
    return data.to_list(), revision


def read_file(path: str | Path) -> list[dict]:
    """The rows of a .jsonl, .json (one list of objects), .parquet or .csv file.

    Values of a .csv are text.

    Raises:
        ValueError: a missing file, another suffix, or content that is not rows.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data must be a file, but there is none at {path}")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} must be a parquet file: {error}") from error
    if path.suffix == ".jsonl":
        return _read_lines(path)
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix != ".json":
        raise ValueError(
            f"a file of data must end in one of {', '.join(SUFFIXES)}, got {path.name!r}"
        )
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{path} must hold one list of objects, got {type(rows).__name__} (or .jsonl with one "
            "object a line)"
        )
    return rows


def check_columns(
    rows: Sequence[dict], columns: Sequence[str], may_be_empty: Sequence[str] = ()
) -> None:
    """Raises ValueError unless each row has text in each column, non-blank except in
    `may_be_empty`.

    The message names the row, the column, and its content.
    """
    for number, row in enumerate(rows):
        for column in columns:
            if column not in row:
                raise ValueError(
                    f"every row must have the columns {', '.join(columns)}, but row {number} lacks "
                    f"{column!r} and has {sorted(row)}"
                )
            value = row[column]
            if not isinstance(value, str) or not (value.strip() or column in may_be_empty):
                raise ValueError(
                    f"{column!r} must be a non-empty text, but row {number} has {value!r:.100}"
                )


def _read_lines(path: Path) -> list[dict]:
    """The rows of a .jsonl file.

    Other than in a log of a killed run, a truncated last line is an error.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(
                f"every line must be one JSON object, got {line[:80]!r} in line {number} of "
                f"{path}. Repair or delete that line"
            )
        rows.append(row)
    return rows


def _read_csv(path: Path) -> list[dict]:
    """The rows of a CSV file with a header, in UTF-8; an empty cell is None.

    Raises:
        ValueError: another encoding, no header, or a row with another number of cells.
    """
    csv.field_size_limit(sys.maxsize)  # a long solution is no error
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if not all(header) or len({*header}) < len(header) or not header:
                raise ValueError(
                    f"{path} must begin with a line of different column names, got {header}"
                )
            rows = []
            for cells in reader:
                if not cells:  # an empty line
                    continue
                if len(cells) != len(header):
                    raise ValueError(
                        f"{path} must have {len(header)} cells in each row, but line "
                        f"{reader.line_num} has {len(cells)}. Quote cells that hold a comma"
                    )
                rows.append({name: cell or None for name, cell in zip(header, cells, strict=True)})
            return rows
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} must be CSV in UTF-8: {error}. Export it with commas") from error
