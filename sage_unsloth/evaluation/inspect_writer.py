"""A record set as a log of inspect_ai, which `inspect view` opens and `read_eval_log` reads.

One JSON document of version 2: a sample of ours is an epoch. The score `sage_unsloth` is "C" or
"I", with the extracted answer, the grade, how it was reached and by which grader.
https://inspect.aisi.org.uk/eval-logs.html names the fields; the package itself is not needed.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.evaluation.metrics import pass_at_k_curve, powers_of_two
from sage_unsloth.grading.checker import Grade
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.text import file_name
from sage_unsloth.sampling.counts import correct_matrix
from sage_unsloth.sampling.record_files import read_samples, read_settings

SCORER = "sage_unsloth"
NO_TEXT = "(the text of this problem is not in the record set)"


def write_inspect_log(file: Path, out: Path, texts: Mapping[str, str]) -> Path:
    """Writes the log of a record set into `out`, named as inspect_ai names its logs.

    Args:
        file: the record set.
        out: folder.
        texts: problem -> its text.

    Raises:
        ValueError: no record set, or one that is not complete.
    """
    recorded, records = read_settings(file), read_samples(file)
    settings = recorded["settings"]
    log = inspect_log(recorded, records, texts)
    stamp = log["eval"]["created"].replace(":", "-").replace("+", "-")
    task = file_name(settings["benchmark"]).replace("_", "-")  # "_" parts the name
    name = f"{stamp}_{task}_{recorded['run']}.json"
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / name, log)
    return out / name


def inspect_log(
    recorded: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    texts: Mapping[str, str],
) -> dict[str, Any]:
    """The log as JSON holds it.

    Args:
        recorded: the set's settings file; its date, when the set was begun, is the log's.
        records: of the set.
        texts: problem -> its text.

    Raises:
        ValueError: there are none, or a problem lacks samples that another has.
    """
    settings, environment = recorded["settings"], recorded["environment"]
    model, sampling = settings["model"], settings["sampling"]
    problems = list(dict.fromkeys(record["problem_id"] for record in records))
    correct_PN = correct_matrix([*map(dict, records)], problems, of=model)
    if not problems:
        raise ValueError(
            f"a log needs samples, but the set of {model} on {settings['benchmark']} has none"
        )
    count = correct_PN.shape[1]
    begun = datetime.fromisoformat(environment["date"])
    created = begun.isoformat(timespec="seconds")
    config = {
        name: sampling[key]
        for name, key in (
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("max_tokens", "max_completion_length"),
            ("seed", "seed"),
        )
        if sampling.get(key) is not None and not (key == "top_k" and sampling[key] < 0)
    }
    tokens = sum(record["num_tokens"] or 0 for record in records)
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": recorded["run"],
            "run_id": recorded["run"],
            "created": created,
            "task": settings["benchmark"],
            "task_id": recorded["run"],
            "task_version": 0,
            "dataset": {
                "name": settings["benchmark"],
                "samples": len(problems),
                "sample_ids": problems,
                "shuffled": False,
            },
            "model": model,
            "model_generate_config": config,
            "config": {"epochs": count, "epochs_reducer": ["mean"]},
            "packages": {k: v for k, v in environment.get("packages", {}).items() if v},
            "metadata": {"settings": settings, "provenance": recorded.get("provenance", [])},
            "scorers": [{"name": SCORER, "metrics": [{"name": "inspect_ai/accuracy"}]}],
        },
        "plan": {"name": "plan", "steps": [{"solver": "generate"}], "config": config},
        "results": {
            "total_samples": len(records),
            "completed_samples": len(records),
            "scores": [_results(count, correct_PN)],
        },
        "stats": {
            "started_at": created,
            "completed_at": created,
            "model_usage": {model: _usage(tokens)},
        },
        "samples": [
            _sample(record, model, texts)
            for record in sorted(records, key=lambda record: record["sample"])
        ],
    }


def _results(count: int, correct_PN: np.ndarray) -> dict[str, Any]:
    """pass@k with its 95 % interval as the metrics of our score."""
    curve = pass_at_k_curve(count, correct_PN.sum(axis=1)[None], powers_of_two(count))
    metrics = {"accuracy": {"name": "accuracy", "value": float(correct_PN.mean())}}
    for k, estimate in curve.items():
        for part in ("mean", "low", "high"):
            value = float(getattr(estimate, part))
            if np.isfinite(value):
                name = f"pass@{k}" if part == "mean" else f"pass@{k} {part}"
                metrics[name] = {"name": name, "value": value}
    return {"name": SCORER, "scorer": SCORER, "reducer": "mean", "metrics": metrics}


def _sample(record: Mapping[str, Any], model: str, texts: Mapping[str, str]) -> dict[str, Any]:
    text = texts.get(record["problem_id"], NO_TEXT)
    answer = {"role": "assistant", "content": record["completion"], "source": "generate"}
    stop = "max_tokens" if record["finish_reason"] == "length" else "stop"
    right = record["grade"] == Grade.CORRECT
    return {
        "id": record["problem_id"],
        "epoch": record["sample"] + 1,
        "input": text,
        "target": record["gold"],
        "messages": [{"role": "user", "content": text, "source": "input"}, answer],
        "output": {
            "model": model,
            "choices": [{"message": answer | {"model": model}, "stop_reason": stop}],
            "completion": record["completion"],
            "usage": _usage(record["num_tokens"] or 0),
        },
        "scores": {
            SCORER: {
                "value": "C" if right else "I",
                "answer": record.get("extracted"),
                "metadata": {k: record.get(k) for k in ("grade", "kind", "grader")},
            }
        },
        "metadata": {"seed": record.get("seed")},
        "model_usage": {model: _usage(record["num_tokens"] or 0)},
    }


def _usage(tokens: int) -> dict[str, int]:
    return {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}
