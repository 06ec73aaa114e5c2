"""The process of one check:

    python -m sage_unsloth.selftest.worker FOLDER MODULE:FUNCTION ARGUMENTS

with the arguments as a JSON object. It loads nothing but what the check itself loads.
"""

import importlib
import json
import sys
import time
from pathlib import Path

from sage_unsloth.runs.files import append_jsonl

FINDINGS = "findings.jsonl"


def run_check() -> int:
    """Runs the check in FOLDER/work and writes each finding at once."""
    folder, function, arguments = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    work = folder / "work"
    work.mkdir()
    began = time.monotonic()
    module, _, name = function.partition(":")
    check = getattr(importlib.import_module(module), name)
    for finding in check(work, **arguments):
        took = {"seconds": round(time.monotonic() - began, 1)}
        append_jsonl(folder / FINDINGS, [finding.row() | took])
        began = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(run_check())
