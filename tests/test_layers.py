"""A module imports only downwards, imports inside functions included."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.smoke
def test_import_layers_hold():
    """`lint-imports`, in a process of its own because it disables the loggers of others; the layers
    are in pyproject.toml.
    """
    code = (
        "from importlinter.cli import lint_imports as lint; raise SystemExit(lint(no_cache=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
