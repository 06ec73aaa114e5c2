"""Checks that fail in every way that a process can; `test_run.py` runs them."""

import os
import signal
import time

from sage_unsloth.selftest.findings import FAILED, PASSED, Finding


def fine(folder, name="fine", note="as it should be"):
    assert folder.is_dir() and not list(folder.iterdir())
    yield Finding(check="", name=name, status=PASSED, found=note)


def bad(folder):
    yield Finding(check="", name="bad", status=FAILED, found="wrong", remedy="mend it")


def crashes(folder):
    yield from fine(folder, "before the crash")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(folder):
    yield from fine(folder, "before the hang")
    time.sleep(600)


def raises(folder):
    raise RuntimeError(f"no luck in {folder}, as {os.path.expanduser('~')}/x says")
    yield


def tells(folder):
    """What is in its environment that should not be."""
    seen = sorted(k for k in os.environ if "TOKEN" in k and "TOKENIZERS" not in k)
    seen += sorted(k for k in os.environ if k.startswith("UNSLOTH_GRPO"))
    yield Finding(
        check="", name="tells", status=PASSED, found=f"{seen} {os.environ['HF_HUB_OFFLINE']}"
    )
