"""Logs of inspect_ai: one JSON document, or an `.eval` archive with a member for each sample.

An epoch is a sample of each problem. A score of "C" is correct, "I" and "N" (no answer) are not; a
score of several values gives a metric for each, named SCORER/NAME.
"""

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.logged_samples import SampleLog, final_answer

TOOL = "inspect_ai"
VALUES = {"C": 1, "I": 0, "N": 0}
ZSTANDARD = 93  # the archive's compression, which Python's zipfile reads from 3.14 on
HEADER = struct.Struct("<26xHH")  # of a member in an archive: lengths of its name and extra field
FINISHED = {"stop": "stop", "max_tokens": "length", "model_length": "length"}


def is_log(path: Path) -> bool:
    """Whether it is an `.eval` archive, or a JSON document that begins as a log does."""
    if path.suffix == ".eval":
        return path.is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        start = "".join(file.read(400).split())
    return start.startswith('{"version":') and '"eval":{' in start


def read(path: Path) -> SampleLog:
    """The log's samples.

    Raises:
        ValueError: no samples were logged, one has an error, or the archive cannot be read.
    """
    header, samples = _archive(path) if path.suffix == ".eval" else _document(path)
    spec = header["eval"]
    plan = header.get("plan", {}).get("config", {})
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
        tool=TOOL,
        model=spec["model"],
        task=spec.get("task_display_name") or spec["task"],
        temperature=temperature,
        records=[_record(sample) for sample in samples],
        why="some have other scores than others, or none",
    )


def _document(path: Path) -> tuple[dict, list[dict]]:
    log = json.loads(path.read_text(encoding="utf-8"))
    return log, log.get("samples") or []


def _archive(path: Path) -> tuple[dict, list[dict]]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                info.filename: json.loads(_content(archive, info))
                for info in archive.infolist()
                if info.filename == "header.json" or info.filename.startswith("samples/")
            }
    except zipfile.BadZipFile as error:
        raise ValueError(f"an .eval log must be an archive, but {path} is not: {error}") from error
    if "header.json" not in members:
        raise ValueError(
            f"a log must be finished, but {path} has no header.json. Complete it with inspect "
            "eval-retry, or use inspect log convert --to json"
        )
    return members.pop("header.json"), list(members.values())


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A member's content; Zstandard is undone by pyarrow, which `datasets` brings."""
    if info.compress_type != ZSTANDARD:
        return archive.read(info)
    import pyarrow

    with open(str(archive.filename), "rb") as file:
        file.seek(info.header_offset)
        file.seek(sum(HEADER.unpack(file.read(HEADER.size))), 1)
        packed = file.read(info.compress_size)
    return pyarrow.Codec("zstd").decompress(packed, info.file_size, asbytes=True)


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
    """The prompt: as it is, or the last thing that the user says."""
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
