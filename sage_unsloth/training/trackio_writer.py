"""The process that writes a run into trackio's database in `RUN/trackio`.

trackio has one folder and one run in a process, which its import decides. A process of its own
gives each run its folder, and keeps trackio's threads and messages out of training.

    python -m sage_unsloth.training.trackio_writer PROJECT NAME

Lines of JSON on standard input: the run's settings first, then `{"step": ..., "metrics": {...}}`
and `{"step": ..., "table": NAME, "columns": [...], "data": [[...], ...]}`. It writes one line,
"ready", and ends with its input.
"""

import importlib
import json
import os
import sys
from typing import Any


def main(project: str, name: str) -> None:
    """Writes what comes on standard input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # trackio prints what it does
    trackio: Any = importlib.import_module("trackio")
    settings = json.loads(sys.stdin.readline())
    run = trackio.init(
        project=project,
        name=name,
        config=settings,
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        values = given.get("metrics")
        if values is None:
            values = {given["table"]: trackio.Table(columns=given["columns"], data=given["data"])}
        run.log(values, step=given["step"])
    trackio.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
