"""Runs each check in its own process: a crash or hang is one row, and frees the GPU.

python -m sage_unsloth.selftest.process CHECK FOLDER
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.text import is_secret
from sage_unsloth.selftest.checks import Check
from sage_unsloth.selftest.findings import FAILED, NOT_HERE, NOT_RUN, Finding
from sage_unsloth.selftest.worker import FINDINGS

LOG_LINES = 15  # of the process's last, in the row of one that failed
MIN_SECONDS = 20.0  # seconds, below which none is started
REMEDY = "send selftest.json, whose row holds the last lines of the process"


def findings_of(check: Check, seconds: float) -> Iterator[Finding]:
    """Runs a check for at most `seconds` and its own limit, and yields its findings."""
    reason = check.missing()
    if reason is not None:
        yield Finding(check=check.name, name=check.name, status=NOT_HERE, found=reason)
        return
    limit = min(seconds, check.limit)
    if limit < MIN_SECONDS:
        yield Finding(
            check=check.name,
            name=check.name,
            status=NOT_RUN,
            found="the time was over",
            remedy="call the command again: it goes on from here",
        )
        return
    with tempfile.TemporaryDirectory(prefix="sage_unsloth_selftest_") as folder:
        started = time.monotonic()
        code = _run(check, Path(folder), limit)
        took = round(time.monotonic() - started, 1)
        file = Path(folder) / FINDINGS
        rows = read_jsonl(file) if file.exists() else []
        for row in rows:
            yield Finding(**row | {"check": check.name})
        if code == 0 and rows:
            return
        yield _failure(
            check, code, took, limit, (Path(folder) / "log").read_text("utf-8", "replace")
        )


def _failure(check: Check, code: int | None, took: float, limit: float, log: str) -> Finding:
    remedy = REMEDY
    lines = [line for line in log.splitlines() if line.strip()]
    if code is None and limit < check.limit:
        status, result = NOT_RUN, f"stopped after {took:.0f} s, as the time was over"
        remedy = "call the command again: it goes on from here"
    elif code is None:
        status, result = FAILED, f"did not end within {limit:.0f} s"
    elif code < 0:
        status, result = FAILED, f"its process was ended by {signal.Signals(-code).name}"
    else:
        status, result = FAILED, lines[-1] if lines else f"its process ended with code {code}"
    return Finding(
        check=check.name,
        name=check.name,
        status=status,
        found=result,
        remedy=remedy,
        seconds=took,
        figures={"log": lines[-LOG_LINES:]},
    )


def _run(check: Check, folder: Path, limit: float) -> int | None:
    """The exit code of the check's process; None after `limit` seconds."""
    job = [str(folder), check.function, json.dumps(dict(check.arguments))]
    command = [sys.executable, "-m", "sage_unsloth.selftest.worker", *job]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment_of(check, folder),
            cwd=folder,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # whatever ends the wait: nothing of it keeps the card
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment_of(check: Check, folder: Path) -> dict[str, str]:
    """Variables of a check's process.

    No secret, no variable of Unsloth's, no network, one GPU, and caches inside its folder.
    """
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("UNSLOTH_", "TORCH_COMPILE", "TORCHDYNAMO_")) and not is_secret(key)
    }
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "CI"):
        own.pop(key, None)
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [own.get("PYTHONPATH")])]
    own |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": own.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth"),
    }
    return own | dict(check.environment)
