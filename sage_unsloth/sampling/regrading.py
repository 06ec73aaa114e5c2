"""Grades what is on disk again, by today's rules, without drawing anything.

Nothing is lost by a kill: a record set gets lines that replace the grades, a batch at a time; the
rollouts of a training run are replaced as a whole file. What has today's grader in its line is left
alone, so the same call resumes.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.verifiers import VERIFIERS, get_verifier
from sage_unsloth.prompts import recorded_format
from sage_unsloth.runs.files import append_jsonl, read_json, read_jsonl, write_text
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.stopping import finishing
from sage_unsloth.sampling.grading_records import grade_records, is_stale, regraded_line
from sage_unsloth.sampling.record_files import read_samples, read_settings, settings_path

BATCH = 512  # records that are graded and written together


@dataclass(frozen=True)
class Regraded:
    """What grading a file again did.

    Attributes:
        file: the record set, or the rollouts.
        graders: what graded the lines before -> how many.
        changes: (grade before, grade now) of each line that was graded again -> how many.
        total: lines, those that had today's grader included.
        correct: of them, now.
    """

    file: Path
    graders: Counter[str] = field(default_factory=Counter)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    total: int = 0
    correct: int = 0


def checker_of(records: Sequence[dict], file: Path) -> Checker:
    """The checker that graded the records, in today's version.

    Raises:
        ValueError: none of them was graded, or by a checker that is not here.
    """
    names = {record["grader"].split()[0] for record in records if record.get("grader")}
    known = len(names) == 1 and all(name in VERIFIERS or ":" in name for name in names)
    if not known:
        raise ValueError(
            f"a file's records must all be graded by one of {', '.join(VERIFIERS)}, or one "
            f"module:function, but those of {file} were by {', '.join(sorted(names)) or 'none'}. "
            "Run the command that drew them again"
        )
    return get_verifier(names.pop())


def copy_set(file: Path, copy: Path) -> None:
    """Copies a record set to where there is none; the settings come last, and make it one.

    Raises:
        ValueError: there is another set, or one that lacks records of this one.
    """
    if settings_path(copy).exists():
        same = read_settings(file)["run"] == read_settings(copy)["run"]
        keys = [
            {(record["problem_id"], record["sample"]) for record in read_samples(item)}
            for item in (file, copy)
        ]
        if not same or not keys[0] <= keys[1]:
            raise ValueError(
                f"--to must be a new folder, or hold copies of the same records, but {copy} lacks "
                f"some of {file}"
            )
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    for source, target in ((file, copy), (settings_path(file), settings_path(copy))):
        write_text(target, source.read_text(encoding="utf-8"))


def regrade_set(file: Path, grade_seconds: float = 5.0) -> Regraded:
    """Grades a record set again, against the golds that it has.

    Raises:
        ValueError: see `checker_of`; or another process writes to the set.
        KeyboardInterrupt, Terminated: after the batch in flight (`stopping.finishing`).
    """
    with exclusive_lock(file):
        settings, records = read_settings(file)["settings"], read_samples(file)
        checker = checker_of(records, file)
        rules = {"boxed": settings.get("boxed", True), "prompt": recorded_format(settings)}
        with Grader(grading_workers(), grade_seconds, checker=checker, **rules) as grader:
            stale = [record for record in records if is_stale(record, grader, record["gold"])]
            result = _result(file, records, stale)
            with finishing("the batch in flight") as stop:
                for start in range(0, len(stale), BATCH):
                    if stop.cause is not None:
                        break
                    batch = stale[start : start + BATCH]
                    before = [record.get("grade", "none") for record in batch]
                    grade_records(batch, [record["gold"] for record in batch], grader)
                    append_jsonl(file, map(regraded_line, batch))
                    _count(result, before, batch)
    return _total(result, records)


def regrade_rollouts(file: Path, grade_seconds: float = 5.0, copy: Path | None = None) -> Regraded:
    """Grades the rollouts that a training run kept again, by the rules of training.

    Args:
        file: `completions.jsonl` of the run.
        grade_seconds: time limit for one answer.
        copy: where the result goes; None replaces the file.

    Raises:
        ValueError: a process trains in the run's folder.
    """
    copy = copy or file
    source = copy if copy.exists() else file
    run = file.parent / "run.json"
    prompt = recorded_format(read_json(run)["settings"] if run.is_file() else {})
    rows = read_jsonl(source)
    checker = checker_of(rows, source) if any(row.get("grader") for row in rows) else MATH
    with (
        exclusive_lock(copy.parent),
        Grader(grading_workers(), grade_seconds, checker=checker, prompt=prompt) as grader,
    ):
        rows = read_jsonl(source)
        stale = [row for row in rows if row.get("grader") != grader.label]
        result, before = _result(copy, rows, stale), [row["grade"] for row in stale]
        if stale or source != copy:
            problems = [row.get("prompt") for row in stale]
            grade_records(stale, [row["answer"] for row in stale], grader, problems)
            for row in stale:
                del row["gold"]  # it is the row's `answer`
            write_text(copy, "".join(json.dumps(row) + "\n" for row in rows))
    _count(result, before, stale)
    return _total(result, rows)


def _result(file: Path, rows: Sequence[dict], stale: Sequence[dict]) -> Regraded:
    graders = Counter(row.get("grader", "not recorded") for row in stale)
    return Regraded(file, graders=graders, total=len(rows))


def _count(result: Regraded, before: Sequence[str], rows: Sequence[dict]) -> None:
    result.changes.update(zip(before, (row["grade"] for row in rows), strict=True))


def _total(result: Regraded, rows: Sequence[dict]) -> Regraded:
    correct = sum(row["grade"] == Grade.CORRECT for row in rows)
    return Regraded(result.file, result.graders, result.changes, result.total, correct)
