"""One process of `side_by_side`.

    python -m sage_unsloth.training.side_by_side_worker FOLDER

The job is read from standard input, which stays open as long as the parent lives.
"""

import logging
import pickle
import pkgutil
import sys
import time
import traceback
from pathlib import Path

from sage_unsloth.models.embedded import settle_process
from sage_unsloth.runs.children import SAVE_SECONDS, end_with_parent
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import HeldError
from sage_unsloth.runs.stopping import Terminated, ending
from sage_unsloth.runs.text import PrintableFormatter
from sage_unsloth.trainers.backends import load_backend
from sage_unsloth.training.side_by_side import LOG_FILE, RESULT_FILE, Job


def work(job: Job) -> float:
    """Starts or resumes the job; its seconds."""
    function = pkgutil.resolve_name(job.work)
    began = time.monotonic()
    while True:
        started = time.perf_counter()
        try:
            function(**job.arguments)
        except HeldError:
            # A process of a killed call may still be saving its step in this folder.
            if time.monotonic() - began > SAVE_SECONDS:
                raise
            time.sleep(0.5)
        else:
            return time.perf_counter() - started


def run_worker(folder: str) -> int:
    """Writes `said.txt` (the log) and `ended.json` (the seconds or the error)."""
    handler = logging.FileHandler(Path(folder) / LOG_FILE)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("sage_unsloth").setLevel(logging.INFO)
    job = pickle.load(sys.stdin.buffer)
    end_with_parent()
    try:
        with ending():
            load_backend(job.backend)
            if job.is_small:
                settle_process()
            outcome = {"seconds": work(job)}
    except (KeyboardInterrupt, Terminated) as stop:
        # The exit status of a shell for a process that a signal ended.
        return 128 + stop.signum if isinstance(stop, Terminated) else 130
    except Exception as error:
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    write_json(Path(folder) / RESULT_FILE, outcome)
    return 0 if "seconds" in outcome else 2


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1]))
