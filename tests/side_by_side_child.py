"""Stands in for a process that trains, in `training/test_side_by_side.py`: it does what its job's
name says.
"""

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

from sage_unsloth.runs.children import end_with_parent
from sage_unsloth.training.side_by_side import LOG_FILE, RESULT_FILE

own = Path(sys.argv[1])
job = pickle.load(sys.stdin.buffer)
end_with_parent()
job.folder.mkdir(exist_ok=True)


def save(*_):
    (job.folder / "saved").write_text(str(os.getpid()))
    sys.exit(143)


signal.signal(signal.SIGTERM, save)
(job.folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.25}\n')
(own / LOG_FILE).write_text(f"{job.name}: one line\nanother line\n")
if job.name == "waits":
    time.sleep(60)
if job.name == "fails":
    time.sleep(0.5)
    (own / RESULT_FILE).write_text(json.dumps({"error": "ValueError: the guide must be finite"}))
    sys.exit(2)
if job.name == "dies":
    print("out of memory, as it seems", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
(own / RESULT_FILE).write_text(json.dumps({"seconds": 1.5}))
