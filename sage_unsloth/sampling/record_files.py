"""The append-only file of a record set, and its settings.

A set is a .jsonl file with a `.settings.json` next to it. One line is one completion:

    run           the set that it belongs to: a digest of its settings
    model, benchmark, problem_id, sample    sample counts from 0
    seed          of this completion's own random stream (`record_sets.sample_seed`)
    completion, num_tokens, finish_reason   without EOS; "stop" (by EOS) or "length"
    token_ids                               of the completion; only in a rehearsal's file
    extracted, gold, grade, kind, grader    the compared texts, the grade, how it was reached, and
                                            checker, versions and rules of extraction

A later line with the same problem and sample replaces the fields that it names: this is how a set
is graded again without sampling. More samples, or some of the problems, belong to the same set,
because a completion depends only on its own seed. Any other setting makes another set, and a file
accepts only its own set.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_json, read_jsonl, write_json
from sage_unsloth.runs.record import environment, refuse_other_settings
from sage_unsloth.sampling.engines import SamplingConfig

FORMAT = 2  # of the file; 1 had a seed for each batch
# Settings that a set may change: they decide how much is drawn at once, and how, but not what.
FREE_SETTINGS = ("num_samples", "batch_size", "grade_seconds")


def settings_path(path: str | Path) -> Path:
    return Path(path).with_suffix(".settings.json")


def set_settings(
    config: SamplingConfig,
    engine: str,
    model: str,
    benchmark: str,
    identity: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The settings that identify a record set."""
    settings = {
        "model": model,
        "benchmark": benchmark,
        "engine": engine,
        "sampling": {k: v for k, v in asdict(config).items() if k not in FREE_SETTINGS},
    } | dict(identity or {})
    return json.loads(json.dumps(settings))


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings file of a record set.

    Returns:
        `format`, `run`, `settings`, `provenance`, `environment`, `prompts`.

    Raises:
        ValueError: it is missing, or of another format.
    """
    file = settings_path(path)
    if not file.is_file():
        raise ValueError(
            f"a record set needs its settings file, and there is no {file}. Was the .jsonl moved "
            "without it?"
        )
    recorded = read_json(file)
    result = recorded.get("format", 1)
    if result != FORMAT:
        remedy = (
            "Upgrade sage_unsloth" if result > FORMAT else "Choose another --out and sample again"
        )
        raise ValueError(
            f"record sets must be of format {FORMAT}, but {file} is of format {result}. {remedy}"
        )
    return recorded


def read_samples(path: str | Path) -> list[dict]:
    """The records of a set in sampling order, each with its last fields; none without a file.

    Raises:
        ValueError: a line is not a record, or belongs to another set.
    """
    if not Path(path).exists():
        return []  # of a set whose first batch is not complete
    records: dict[tuple[str, int], dict] = {}
    run = None
    for number, row in enumerate(read_jsonl(path), 1):
        run = run or row.get("run")
        if not {"problem_id", "sample"} <= row.keys() or row.get("run", run) != run:
            raise ValueError(
                f"every line must be a record of one set, {run}, but line {number} of {path} is "
                f"one of {row.get('run')!r}, with {sorted(row)}. Delete that line, and it is drawn "
                "again"
            )
        records.setdefault((row["problem_id"], row["sample"]), {}).update(row)
    # Of a completion whose own line was deleted only a later grade is left: it is drawn again.
    return [record for record in records.values() if "num_tokens" in record]


def read_set(path: str | Path) -> tuple[dict[str, Any], list[dict]]:
    """The settings and the records of a set, sorted by problem and sample.

    So a report does not depend on which completion ended first.

    Raises:
        ValueError: as `read_settings` and `read_samples`.
    """
    recorded, records = read_settings(path), read_samples(path)
    # Problems that the settings do not name, as in a set that other code wrote, as they came.
    known = (*recorded.get("prompts", ()), *(record["problem_id"] for record in records))
    places = {problem: place for place, problem in enumerate(dict.fromkeys(known))}
    records.sort(key=lambda record: (places[record["problem_id"]], record["sample"]))
    return recorded["settings"], records


def refuse_other_set(path: str | Path, settings: dict[str, Any]) -> None:
    """Raises ValueError if the file holds a set with other settings."""
    if settings_path(path).exists() or Path(path).exists():
        recorded = read_settings(path)["settings"]
        files = f"{Path(path).name} and {settings_path(path).name}"
        remedy = f"Choose another --out, or delete {files} to sample this set again"
        refuse_other_settings(Path(path), recorded, settings, remedy)


def open_set(
    path: Path,
    settings: dict[str, Any],
    prompts: Mapping[str, Sequence[int]],
    provenance: Sequence[dict],
    engine_arguments: Mapping[str, Any],
) -> tuple[str, list[dict]]:
    """Starts a record set, or checks that the file belongs to it.

    Args:
        path: of the set; this process holds its lock.
        settings: `set_settings`.
        prompts: problem -> token ids; new problems are added to the set.
        provenance: origin of the problems, for a new set.
        engine_arguments: of the engine, for a new set.

    Returns:
        The name of the set and its records.

    Raises:
        ValueError: other settings, another prompt for a problem, or records of another set.
    """
    refuse_other_set(path, settings)
    digests = {problem: _digest(ids) for problem, ids in prompts.items()}
    file = settings_path(path)
    if file.exists():
        recorded = read_settings(path)
        _refuse_other_prompts(path, recorded["prompts"], digests)
        if not digests.keys() <= recorded["prompts"].keys():
            write_json(file, recorded | {"prompts": recorded["prompts"] | digests})
    else:
        recorded = {"format": FORMAT, "run": _digest(settings), "settings": settings}
        recorded |= {"provenance": list(provenance), "environment": environment()}
        if engine_arguments:
            recorded["engine_arguments"] = dict(engine_arguments)
        write_json(file, recorded | {"prompts": digests})
    run = recorded["run"]
    records = read_samples(path) if path.exists() else []
    if records and records[0].get("run") != run:
        raise ValueError(
            f"the records of {path} must be of the set that {file} names, {run}, but they are of "
            f"{records[0].get('run')!r}. Put back the file that belongs to it, or choose another "
            "--out"
        )
    return run, records


def _refuse_other_prompts(path: Path, known: Mapping[str, str], digests: Mapping[str, str]) -> None:
    changed = [p for p, digest in digests.items() if known.get(p, digest) != digest]
    if changed:
        raise ValueError(
            "prompts of a record set must not change (text, template, tokenizer), but "
            f"{len(changed)} in {path} differ, {changed[0]!r} the first. Choose another --out"
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def records_schema() -> dict[str, Any]:
    """The JSON Schema of a line of a record set, `records.schema.json`."""
    return read_json(Path(__file__).with_name("records.schema.json"))
