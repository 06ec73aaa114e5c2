"""What a process knows of those beside it."""

import logging
import subprocess
import sys

import pytest

from sage_unsloth.runs import children
from sage_unsloth.runs.processes import is_sharded, sharding
from sage_unsloth.runs.text import log_to_terminal


@pytest.mark.parametrize("value", ["true", "True"])
@pytest.mark.parametrize("kind", ["FSDP", "DeepSpeed"])
def test_accelerates_variables_say_what_splits_the_model(monkeypatch, kind, value):
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(variable, raising=False)
    assert sharding() is None and not is_sharded()
    monkeypatch.setenv(f"ACCELERATE_USE_{kind.upper()}", value)
    assert sharding() == kind and is_sharded()


def test_a_parent_has_longer_to_end_than_its_children(monkeypatch):
    allowed = []
    monkeypatch.setattr(children, "allow", allowed.append)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    children.end_children([child])
    assert child.returncode is not None
    assert allowed[0] > children.SAVE_SECONDS


def test_a_line_for_the_terminal_is_its_message_alone(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_terminal()
    logging.getLogger("sage_unsloth").warning("a\x1b[2J")
    assert capsys.readouterr().err == "a␛[2J\n"
