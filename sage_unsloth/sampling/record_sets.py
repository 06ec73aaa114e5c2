"""Record sets: completions of one model on one benchmark, drawn, graded and kept so that nothing is
drawn twice.

A set is a .jsonl file that only grows, with `.settings.json` beside it. One line is one completion:

    run           the set that it belongs to: a digest of its settings
    model, benchmark, problem_id, sample    sample counts from 0
    seed          of this completion's own random stream (`sample_seed`)
    completion, num_tokens, finish_reason   without EOS; "stop" (by EOS) or "length"
    extracted, gold, grade, grader          what was compared, the grade, and by which checker and versions

A later line with the same problem and sample replaces the fields that it names: that is how a set
is graded again without drawing anything. More samples, or some of the problems, belong to the same
set, because a completion depends on its own seed only; any other setting makes another set, and the
file of one is refused to another.

Shapes: P problems, N samples per problem.
"""

import contextlib
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.prompts import render_prompt
from sage_unsloth.runs.files import append_jsonl, read_json, read_jsonl, write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment, refuse_other_settings
from sage_unsloth.runs.stopping import finishing
from sage_unsloth.sampling.engines import Engine, SamplingConfig

FORMAT = 2  # of the file; 1 had a seed for each batch
# Settings that a set may change: they decide how much is drawn at once, and how, but not what.
FREE_SETTINGS = ("num_samples", "batch_size", "grade_seconds")


class EngineError(RuntimeError):
    """The engine failed while drawing; what was drawn before is on disk."""


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """The seed of one completion: the first 52 bits of the SHA-256 of `[seed, problem_id, sample]`
    as JSON.

    It depends on nothing else, so any completion can be drawn again alone, and two models answer a
    problem from the same stream. 52 bits survive any reader of JSON; among a million completions,
    two share a seed with a chance of 1e-4.
    """
    text = json.dumps([seed, problem_id, sample])
    return int(hashlib.sha256(text.encode()).hexdigest()[:13], 16)


def sample_and_grade(
    config: SamplingConfig,
    engine: Engine,
    rows: Sequence[dict],
    path: str | Path,
    *,
    model: str,
    benchmark: str,
    identity: Mapping[str, Any] | None = None,
    provenance: Sequence[dict] = (),
    checker: Checker = MATH,
    boxed: bool = True,
    bar: Any = None,
) -> list[dict]:
    """Draw what is missing of N completions of every problem, grade it, and return these problems'
    records.

    Args:
        engine: of the model; see `engines`.
        rows: dicts with `id`, `problem`, `answer`, and `gold` where the checker compares with
            something else.
        path: the record set.
        model, benchmark: names for the records.
        identity: what else tells this set from others, such as digests of the weights
            (`model_identity`).
        provenance: where the rows are from; kept beside the settings, and free to change as long as
            the prompts do not.
        boxed: where there is no solution tag, the last box is graded, as befits an evaluation; RL
            rewards the tag alone.
        checker: grades; records of another checker or version are graded again first.
        bar: a tqdm bar over completions to advance; None makes one.

    Raises:
        ValueError: the file belongs to another set, or another process writes to it; or see
            `Grader.grade_many`.
        EngineError: the engine failed; a second run goes on from there.
        KeyboardInterrupt, Terminated: Ctrl-C or SIGTERM, after the batch in flight
            (`stopping.finishing`).
    """
    from tqdm.auto import tqdm

    path = Path(path)
    with (
        locked(path),
        Grader(grading_workers(), config.grade_seconds, boxed=boxed, checker=checker) as grader,
        contextlib.ExitStack() as stack,
    ):
        prompts = {row["id"]: prompt_ids(engine.tokenizer, row["problem"]) for row in rows}
        identity = dict(identity or {}) | ({} if boxed else {"boxed": False})
        settings = set_settings(config, engine.name, model, benchmark, identity)
        run = _open_set(path, settings, prompts, provenance)
        records = read_samples(path) if path.exists() else []
        if records and records[0].get("run") != run:
            raise ValueError(
                f"the records of {path} must be of the set that {settings_path(path)} names, "
                f"{run}; they are of "
                f"{records[0].get('run')!r}; put back the file that belongs to it, or choose "
                f"another --out"
            )
        _grade_again(path, records, rows, grader)
        done = {(record["problem_id"], record["sample"]) for record in records}
        missing = [
            (row, sample)
            for row in rows
            for sample in range(config.num_samples)
            if (row["id"], sample) not in done
        ]
        bar = (
            bar
            if bar is not None
            else tqdm(
                total=len(rows) * config.num_samples,
                initial=len(rows) * config.num_samples - len(missing),
                desc=f"{model} on {benchmark}",
                unit="completion",
            )
        )
        tokens, started = 0, time.perf_counter()
        stop = stack.enter_context(finishing("the batch in flight"))
        for start in range(0, len(missing), config.batch_size):
            if stop.asked is not None:
                break
            batch = missing[start : start + config.batch_size]
            seeds = [sample_seed(config.seed, row["id"], sample) for row, sample in batch]
            try:
                drawn = engine.draw([prompts[row["id"]] for row, _ in batch], seeds, config)
            except Exception as error:
                # Engines fail by classes of their own (vLLM's EngineDeadError, CUDA's out of
                # memory).
                raise EngineError(
                    f"the engine must draw {len(batch)} completions of {model} on {benchmark}; "
                    f"it failed: "
                    f"{type(error).__name__}: {error!s:.500}; what was drawn before is kept in "
                    f"{path}; run the same "
                    "command again, with a smaller batch if memory ran out"
                ) from error
            golds = [gold_of(row) for row, _ in batch]
            new = [
                {
                    "run": run,
                    "model": model,
                    "benchmark": benchmark,
                    "problem_id": row["id"],
                    "sample": sample,
                    "seed": seed,
                    "completion": completion.text,
                    "num_tokens": completion.num_tokens,
                    "finish_reason": completion.finish_reason,
                    "gold": gold,
                }
                for (row, sample), seed, completion, gold in zip(
                    batch, seeds, drawn, golds, strict=True
                )
            ]
            try:
                grades = grader.grade_many([completion.text for completion in drawn], golds)
            except Exception:
                append_jsonl(path, new)  # what was drawn is kept, and graded when the set goes on
                raise
            for record, grade in zip(new, grades, strict=True):
                record |= _graded(record["completion"], record["gold"], grade, grader)
            append_jsonl(path, new)
            tokens += sum(completion.num_tokens for completion in drawn)
            bar.set_postfix_str(
                f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False
            )
            bar.update(len(batch))
        bar.refresh()
        wanted = set(prompts)
        return [
            record
            for record in (read_samples(path) if path.exists() else [])
            if record["problem_id"] in wanted and record["sample"] < config.num_samples
        ]


def prompt_ids(tokenizer: Any, problem: str) -> list[int]:
    """The training prompt, byte for byte, as tokens; the template brings every special token that
    it needs.
    """
    return tokenizer(render_prompt(tokenizer, problem), add_special_tokens=False)["input_ids"]


def gold_of(row: dict) -> str:
    """What the checker compares an answer with."""
    return row.get("gold", row["answer"])


def settings_path(path: str | Path) -> Path:
    """Where the settings of a record set stand."""
    return Path(path).with_suffix(".settings.json")


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings file of a record set: `format`, `run`, `settings`, `provenance`, `environment`,
    `prompts`.

    Raises:
        ValueError: there is none, or it is of another format.
    """
    file = settings_path(path)
    if not file.is_file():
        raise ValueError(
            f"a record set has its settings beside it; there is no {file}; was the .jsonl moved "
            f"alone?"
        )
    recorded = read_json(file)
    found = recorded.get("format", 1)
    if found != FORMAT:
        remedy = "upgrade sage_unsloth" if found > FORMAT else "choose another --out and draw again"
        raise ValueError(
            f"record sets must be of format {FORMAT}; {file} is of format {found}; {remedy}"
        )
    return recorded


def set_settings(
    config: SamplingConfig,
    engine: str,
    model: str,
    benchmark: str,
    identity: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What tells a record set from others, as its settings file holds it."""
    settings = {
        "model": model,
        "benchmark": benchmark,
        "engine": engine,
        "sampling": {k: v for k, v in asdict(config).items() if k not in FREE_SETTINGS},
    } | dict(identity or {})
    return json.loads(json.dumps(settings))


def refuse_other_set(path: str | Path, settings: dict[str, Any]) -> None:
    """Raises ValueError where `path` holds a set with other settings; a set that is not there yet
    is none.
    """
    if settings_path(path).exists() or Path(path).exists():
        refuse_other_settings(Path(path), read_settings(path)["settings"], settings)


def _open_set(
    path: Path,
    settings: dict[str, Any],
    prompts: Mapping[str, Sequence[int]],
    provenance: Sequence[dict],
) -> str:
    """Check that the file is of this set, or begin it; returns the name of the set."""
    refuse_other_set(path, settings)
    digests = {problem: _digest(ids) for problem, ids in prompts.items()}
    file = settings_path(path)
    if not file.exists():
        recorded = {"format": FORMAT, "run": _digest(settings), "settings": settings}
        recorded |= {"provenance": list(provenance), "environment": environment()}
        write_json(file, recorded | {"prompts": digests})
        return recorded["run"]
    recorded = read_settings(path)
    known = recorded["prompts"]
    changed = [
        problem for problem in digests if known.get(problem, digests[problem]) != digests[problem]
    ]
    if changed:
        raise ValueError(
            f"a record set has one prompt for each problem; in {path}, {len(changed)} differ "
            f"from those of this run, "
            f"{changed[0]!r} the first (the problem's text, the template or the tokenizer "
            f"changed); choose another --out"
        )
    if not digests.keys() <= known.keys():
        write_json(file, recorded | {"prompts": known | digests})
    return recorded["run"]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def read_samples(path: str | Path) -> list[dict]:
    """The records of a set, in the order in which they were drawn, each as its last line left it.

    Raises:
        ValueError: a line within the file is no record, or one of another set.
    """
    records: dict[tuple[str, int], dict] = {}
    run = None
    for number, row in enumerate(read_jsonl(path), 1):
        run = run or row.get("run")
        if not {"problem_id", "sample"} <= row.keys() or row.get("run", run) != run:
            raise ValueError(
                f"every line must be a record of one set, {run}; line {number} of {path} is one "
                f"of {row.get('run')!r}, with "
                f"{sorted(row)}; delete that line, and the completion is drawn again"
            )
        records.setdefault((row["problem_id"], row["sample"]), {}).update(row)
    return list(records.values())


def _grade_again(path: Path, records: list[dict], rows: Sequence[dict], grader: Grader) -> None:
    """Grades every record whose checker, versions or gold are not today's, in the file and in
    `records`.
    """
    golds = {row["id"]: gold_of(row) for row in rows}
    label = grader.checker.label
    stale = [
        record
        for record in records
        if record["problem_id"] in golds
        and (record.get("grader") != label or record["gold"] != golds[record["problem_id"]])
    ]
    if not stale:
        return
    texts = [record["completion"] for record in stale]
    wanted = [golds[record["problem_id"]] for record in stale]
    for record, gold, grade in zip(stale, wanted, grader.grade_many(texts, wanted), strict=True):
        record.update(_graded(record["completion"], gold, grade, grader))
    names = ("problem_id", "sample", "extracted", "gold", "grade", "grader")
    append_jsonl(path, [{name: record[name] for name in names} for record in stale])


def _graded(completion: str, gold: str, grade: Grade, grader: Grader) -> dict[str, Any]:
    return {
        "extracted": extract_answer(completion, boxed=grader.boxed),
        "gold": gold,
        "grade": grade.value,
        "grader": grader.checker.label,
    }


def correct_counts(records: Sequence[dict], rows: Sequence[dict], num_samples: int) -> np.ndarray:
    """Correct completions of each problem, (P,), in the order of `rows`.

    Raises:
        ValueError: a problem does not have exactly `num_samples` records.
    """
    found: dict[Any, list[bool]] = defaultdict(list)
    for record in records:
        found[record["problem_id"]].append(record["grade"] == Grade.CORRECT)
    for row in rows:
        if len(found[row["id"]]) != num_samples:
            raise ValueError(
                f"every problem must have {num_samples} samples; {row['id']!r} has "
                f"{len(found[row['id']])}; "
                "run the same command again to draw the rest"
            )
    return np.array([sum(found[row["id"]]) for row in rows])
