"""Reads samples from another tool's log, to compare them like a record set.

The tool's own grades are used unless the completions are graded again here. A log has its own names
of problems; logs and record sets on one benchmark are matched by the order of their problems, which
the golds must confirm.
"""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_unsloth.evaluation import inspect_log, lm_eval_log
from sage_unsloth.evaluation.logged_samples import SampleLog
from sage_unsloth.evaluation.record_tables import RecordSet, record_set
from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.sampling.grading_records import grade_records

logger = logging.getLogger(__name__)

GRADE_SECONDS = 5.0
BINARY = (0, 1)  # True, False, 0.0 and 1.0 equal them
TOOLS = {
    lm_eval_log.LM_EVAL: (lm_eval_log.is_lm_eval_log, lm_eval_log.read_lm_eval_log),
    inspect_log.INSPECT_AI: (inspect_log.is_inspect_log, inspect_log.read_inspect_log),
}
"""Tool -> whether a file is its log, and the log's samples."""


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How logs of other tools are read.

    Attributes:
        metrics: the metrics of correctness, for logs with several candidates.
        regrade: grade every completion here, and ignore the tool's grades.
        same: task of a log -> the benchmark with its problems.
    """

    metrics: Sequence[str] = ()
    regrade: bool = False
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)


def parse_pairs(
    texts: Sequence[str],
    form: str = "--same TASK=BENCHMARK",
    example: str = "gsm8k_cot=gsm8k",
) -> dict[str, str]:
    """Pairs `A=B` as a dict.

    Args:
        form: option and form, for the message.
        example: of a pair, for the message.

    Raises:
        ValueError: another form.
    """
    pairs = [text.partition("=") for text in texts]
    option, _, shape = form.partition(" ")
    for text, (first, _, second) in zip(texts, pairs, strict=True):
        if not first or not second:
            raise ValueError(f"{option} must be {shape}, got {text!r}. For example {example}")
    return {first: second for first, _, second in pairs}


def tool_of(path: Path) -> str | None:
    """The tool that wrote the file, by its content; None if unknown."""
    return next((name for name, (is_log, _) in TOOLS.items() if is_log(path)), None)


def logs_below(folder: Path) -> list[Path]:
    """The logs of other tools in a folder, recursively, by name."""
    files = (file for pattern in ("*.jsonl", "*.json", "*.eval") for file in folder.rglob(pattern))
    return sorted(file for file in files if tool_of(file) is not None)


def named_path(text: str | Path) -> tuple[str | None, Path]:
    """`NAME=PATH` or `PATH`; an existing path is never split."""
    name, equals, path = str(text).partition("=")
    if not equals or Path(text).exists():
        return None, Path(text)
    return name, Path(path)


def read_log(path: Path, name: str | None = None) -> SampleLog:
    """The log's samples, with problems named TASK/ID.

    Args:
        name: of the model; None takes the log's.

    Raises:
        ValueError: no samples, or different numbers of samples.
    """
    tool = tool_of(path)
    if tool is None:
        raise ValueError(
            f"a log must be one of {', '.join(TOOLS)}, but {path} is not. Give samples_*.jsonl "
            "(lm_eval --log_samples), or a .json log of inspect_ai"
        )
    log = TOOLS[tool][1](path)
    counts: dict[str, int] = defaultdict(int)
    for record in log.records:
        counts[record["problem_id"]] += 1
    if len(set(counts.values())) != 1:
        fewest = min(counts, key=lambda problem: counts[problem]) if counts else "none"
        raise ValueError(
            f"a log must have as many graded samples of every problem, but {path} has "
            f"{sorted(set(counts.values()))}, the fewest of {fewest!r}. Let its tool complete the "
            "run"
        )
    records = [
        record | {"problem_id": f"{log.task}/{record['problem_id']}"} for record in log.records
    ]
    return dataclasses.replace(log, model=name or log.model, records=records)


def log_sets(
    logs: Sequence[SampleLog], own_sets: Sequence[RecordSet], options: ReadingOptions
) -> list[RecordSet]:
    """Logs as record sets, with the problem names of our sets on the same benchmark.

    Args:
        logs: see `read_log`.

    Raises:
        ValueError: no usable metric, other problems than a set on the same benchmark, or a log
            without completions that must be graded here.
    """
    known = {item.benchmark: (_in_order(item), item.grader) for item in reversed(own_sets)}
    _refuse_unused(logs, options)
    if options.regrade:
        _refuse_without_texts(logs)
    sets = []
    for log in logs:
        benchmark = options.same.get(log.task, log.task)
        golds, grader = known.get(benchmark, ({}, ""))
        records = rename_problems(log, golds, benchmark)
        if options.regrade:
            _grade_here(records, _checker(grader))
            by = records[0]["grader"]
        else:
            metric = chosen_metric(log, options.metrics)
            by = f"{log.tool}: {metric}"
            for record in records:
                right = record["scores"][metric] == 1
                record["grade"] = (Grade.CORRECT if right else Grade.WRONG).value
                record["grader"] = by
        item = record_set(records, log.model, benchmark, {"temperature": log.temperature})
        texts = {record["problem_id"]: record["problem"] for record in records}
        item = dataclasses.replace(item, tool=log.tool, texts=texts)
        known.setdefault(benchmark, (dict(item.golds), by if options.regrade else ""))
        sets.append(item)
    return sets


def _in_order(item: RecordSet) -> dict[str, str]:
    """problem -> gold in the benchmark's order if its texts are stored; else in sampling order."""
    names = item.texts if item.golds.keys() <= item.texts.keys() else item.golds
    return {name: item.golds[name] for name in names if name in item.golds}


def chosen_metric(log: SampleLog, expected: Sequence[str] = ()) -> str:
    """The metric of correctness: the only candidate, or one of `expected`.

    Raises:
        ValueError: samples without their own grade, or no metric or several candidates.
    """
    offered = _metric_kinds(log)
    remedy = (
        "give --regrade, which grades every completion here"
        if log.has_texts
        else "leave the log out: without completions, nothing can be graded here either"
    )
    if not offered or any(record["scores"].keys() != offered.keys() for record in log.records):
        raise ValueError(
            f"every sample must have a grade of its own, but those of {log.path} have none "
            f"({log.why}): {remedy}"
        )
    binary = [name for name, is_binary in offered.items() if is_binary]
    if not binary:
        raise ValueError(
            f"a metric must be 0 or 1 for every sample, but {log.path} has {_names(offered)}, "
            f"which are not: {remedy}"
        )
    chosen = [name for name in binary if name in expected] or binary
    if len(chosen) > 1:
        raise ValueError(
            f"one metric must say what is correct, but {log.path} has {_names(chosen)}. Choose one "
            "of them with --metric"
        )
    return chosen[0]


def _metric_kinds(log: SampleLog) -> dict[str, bool]:
    """The log's metrics, and whether each is always 0 or 1."""
    offered: dict[str, bool] = {}
    for record in log.records:
        for name, value in record["scores"].items():
            offered[name] = offered.get(name, True) and value in BINARY
    return offered


def _refuse_without_texts(logs: Sequence[SampleLog]) -> None:
    """Raises ValueError for logs without completions to grade, with their metrics."""
    for log in logs:
        if not log.has_texts:
            binary = [name for name, is_binary in _metric_kinds(log).items() if is_binary]
            own = f"compare it without --regrade: --metric {' or '.join(binary)}"
            raise ValueError(
                f"--regrade grades completions, but {log.path} has log-likelihoods of given "
                f"answers: {own if binary else 'leave it out'}"
            )


def _refuse_unused(logs: Sequence[SampleLog], options: ReadingOptions) -> None:
    """Raises ValueError for names that no log has."""
    for option, names, known in (
        (
            "--metric",
            options.metrics,
            {m for log in logs for r in log.records for m in r["scores"]},
        ),
        ("--same", options.same, {log.task for log in logs}),
    ):
        unused = [name for name in names if name not in known]
        if unused:
            raise ValueError(
                f"{option} must name what the logs have, {_names(sorted(known))}, got "
                f"{_names(unused)}"
            )


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def rename_problems(log: SampleLog, golds: Mapping[str, str], benchmark: str) -> list[dict]:
    """The log's records with the problem names and golds of a set on the same benchmark.

    Args:
        golds: problem -> gold, in the order of the set; may be empty.

    Raises:
        ValueError: another number of problems, or other golds in order.
    """
    own = {record["problem_id"]: record["gold"] for record in log.records}
    names = dict(zip(own, own, strict=True))
    if golds and own.keys() != golds.keys():
        if len(own) != len(golds):
            raise ValueError(
                f"sets on {benchmark} must have the same problems, but {log.path} has {len(own)} "
                f"and the set before it {len(golds)}. Compare as many of each (--limit, --problems)"
            )
        names = dict(zip(own, golds, strict=True))
    different = [
        mine for mine, name in names.items() if golds and not _alike(own[mine], golds[name])
    ]
    if different:
        mine = different[0]
        raise ValueError(
            f"sets on {benchmark} must have the same problems in the same order, with the same "
            f"golds, but {len(different)} differ: {mine} of {log.path} has {own[mine]!r:.60}, and "
            f"{names[mine]} before it {golds[names[mine]]!r:.60}. Give the tool this benchmark's "
            "problems, or name another (--same TASK=BENCHMARK)"
        )
    if any(mine != name for mine, name in names.items()):
        logger.info(
            "%s: its %d problems are taken as those of %s: same golds in the same order",
            *(log.path.name, len(names), benchmark),
        )
    return [
        record | {"problem_id": name, "gold": golds.get(name, record["gold"])}
        for record in log.records
        for name in (names[record["problem_id"]],)
    ]


def _alike(gold: str, other: str) -> bool:
    """Whether two golds are equal, except for spaces and thousands separators."""
    first, second = ("".join(text.split()).replace(",", "") for text in (gold, other))
    return first == second


def _checker(grader: str) -> Checker:
    """The checker for grading a log again: that of the sets to compare with, or mathematics."""
    return get_verifier(grader.split()[0]) if grader else MATH


def _grade_here(records: list[dict], checker: Checker) -> None:
    with Grader(grading_workers(), GRADE_SECONDS, boxed=True, checker=checker) as grader:
        grade_records(records, [record["gold"] for record in records], grader)
