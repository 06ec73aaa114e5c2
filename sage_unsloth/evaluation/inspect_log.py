"""Logs of inspect_ai: one JSON document, converted from `.eval` by `inspect log convert --to json`.

An epoch is a sample of each problem. A score of "C" is correct, "I" and "N" (no answer) are not; a
score with several values gives one metric each, SCORER/NAME.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.logged_samples import SampleLog, final_answer

INSPECT_AI = "inspect_ai"
VALUES = {"C": 1, "I": 0, "N": 0}
FINISHED = {"stop": "stop", "max_tokens": "length", "model_length": "length"}


def is_inspect_log(path: Path) -> bool:
    """Whether it is a JSON document that begins like a log, or an `.eval` archive."""
    if path.suffix == ".eval":
        return path.is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        start = "".join(file.read(400).split())
    return start.startswith('{"version":') and '"eval":{' in start


def read_inspect_log(path: Path) -> SampleLog:
    """The log's samples.

    Raises:
        ValueError: an archive, no logged samples, or a sample with an error.
    """
    if path.suffix == ".eval":
        raise ValueError(
            f"a log of inspect_ai must be JSON, but {path} is an archive. Convert it: "
            f"inspect log convert --to json --output-dir {path.parent} {path}"
        )
    log = json.loads(path.read_text(encoding="utf-8"))
    spec, samples = log["eval"], log.get("samples") or []
    plan = log.get("plan", {}).get("config", {})
    temperature = plan.get("temperature", spec.get("model_generate_config", {}).get("temperature"))
    order = {name: place for place, name in enumerate(spec["dataset"].get("sample_ids") or ())}
    samples = sorted(samples, key=lambda sample: (order.get(sample["id"], 0), sample["epoch"]))
    if not samples:
        raise ValueError(
            f"a log must have its samples, but {path} has none. Run inspect without "
            "--no-log-samples"
        )
    failed = [sample["id"] for sample in samples if sample.get("error")]
    if failed:
        raise ValueError(
            f"every sample must have been completed, but {len(failed)} of {path} have errors, "
            f"{failed[0]!r} the first. Complete them with inspect eval-retry"
        )
    return SampleLog(
        path=path,
        tool=INSPECT_AI,
        model=spec["model"],
        task=spec.get("task_display_name") or spec["task"],
        temperature=temperature,
        records=[_record(sample) for sample in samples],
        why="some have other scores than others, or none",
    )


def _record(sample: Mapping[str, Any]) -> dict[str, Any]:
    output = sample.get("output") or {}
    choices = output.get("choices") or [{}]
    completion = output.get("completion") or _text(choices[0].get("message", {}).get("content", ""))
    return {
        "problem_id": str(sample["id"]),
        "sample": sample["epoch"] - 1,
        "problem": _input(sample["input"]),
        "completion": completion,
        "num_tokens": (output.get("usage") or {}).get("output_tokens"),
        "finish_reason": FINISHED.get(choices[0].get("stop_reason", "")),
        "gold": final_answer(sample["target"]),
        "scores": dict(_scores(sample.get("scores") or {})),
    }


def _input(given: str | list[dict]) -> str:
    """The prompt: a text, or the last user turn."""
    if isinstance(given, str):
        return given
    said = [message for message in given if message.get("role") == "user"]
    return _text(said[-1]["content"]) if said else ""


def _text(content: str | list[dict]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")


def _scores(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, score in scores.items():
        value = score["value"]
        if isinstance(value, Mapping):
            yield from ((f"{name}/{part}", VALUES.get(item, item)) for part, item in value.items())
        elif isinstance(value, list):
            yield name, None  # not one value, so not binary
        else:
            yield name, VALUES.get(value, value)
