"""Sample logs of lm-evaluation-harness: `samples_TASK_DATE.jsonl` of `lm_eval --log_samples`.

One line is one document with one filter: `doc_id`, `target`, `arguments`, `resps` (requests by
repeats), `filter`, and a value for each name in `metrics`. Metrics are named "METRIC,FILTER" as in
the tool's results. With `repeats`, the tool grades the filter's output for all responses together,
so there is no grade of each: such a log is graded here, or not at all.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.logged_samples import SampleLog, final_answer
from sage_unsloth.runs.files import read_jsonl

LM_EVAL = "lm-evaluation-harness"
FILE_NAME = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.:-]+")
FIELDS = {"doc_id", "target", "resps"}
# What is no metric, in logs of versions that do not list theirs.
OTHERS = FIELDS | {
    *("doc", "arguments", "filtered_resps", "filter", "metrics"),
    *("doc_hash", "prompt_hash", "target_hash"),
}


def is_lm_eval_log(path: Path) -> bool:
    """Whether the first line is from a sample log."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8") as file:
        try:
            first = json.loads(file.readline() or "null")
        except ValueError:
            return False
    return isinstance(first, dict) and first.keys() >= FIELDS


def read_lm_eval_log(path: Path) -> SampleLog:
    """The log's samples; the folder names the model.

    Raises:
        ValueError: a line is not a sample, or documents have different numbers of responses.
    """
    records: dict[tuple[Any, int], dict] = {}
    repeats, temperature, has_texts = 1, None, True
    for number, line in enumerate(read_jsonl(path), 1):
        if not line.keys() >= FIELDS:
            raise ValueError(
                f"every line must be a sample with {', '.join(sorted(FIELDS))}, but line {number} "
                f"of {path} has {', '.join(sorted(line))}"
            )
        completions = _completions(line["resps"])
        has_texts = has_texts and completions is not None
        completions = [""] if completions is None else completions
        repeats = max(repeats, len(completions))
        scores = {} if len(completions) > 1 else _scores(line)
        prompt, settings = _arguments(line.get("arguments"))
        if settings:
            sampled = settings.get("do_sample", True)
            temperature = settings.get("temperature") if sampled else 0.0
        for sample, completion in enumerate(completions):
            record = records.setdefault(
                (line["doc_id"], sample),
                {
                    "problem_id": str(line["doc_id"]),
                    "sample": sample,
                    "problem": prompt,
                    "completion": completion,
                    "num_tokens": None,
                    "finish_reason": None,
                    "gold": final_answer(line["target"]),
                    "scores": {},
                },
            )
            record["scores"] |= scores
    named = FILE_NAME.fullmatch(path.stem)
    return SampleLog(
        path=path,
        tool=LM_EVAL,
        model=path.absolute().parent.name,
        task=named["task"] if named else path.stem,
        temperature=temperature,
        records=list(records.values()),
        why=f"the tool grades what a filter leaves of {repeats} responses"
        if repeats > 1
        else "the metrics differ from line to line",
        has_texts=has_texts,
    )


def _completions(resps: list) -> list[str] | None:
    """The texts of the first request's repeats; None for log-likelihoods."""
    if len(resps) == 1 and all(isinstance(text, str) for text in resps[0]):
        return list(resps[0])
    return None


def _scores(line: Mapping[str, Any]) -> dict[str, Any]:
    names = line.get("metrics") or [
        name for name in line if name not in OTHERS and isinstance(line[name], int | float)
    ]
    return {f"{name},{line.get('filter', 'none')}": line[name] for name in names}


def _arguments(arguments: Any) -> tuple[str, Mapping[str, Any]]:
    """Prompt and generation settings of the first request, in either layout of the log."""
    if isinstance(arguments, Mapping):
        first = next(iter(arguments.values()), {})
        values = list(first.values()) if isinstance(first, Mapping) else [first]
    else:
        values = list(arguments[0]) if arguments else []
    prompt = values[0] if values and isinstance(values[0], str) else ""
    settings = values[1] if len(values) > 1 and isinstance(values[1], Mapping) else {}
    return prompt, settings
