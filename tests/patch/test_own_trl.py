"""`guided_kl` on TRL's own trainer. Unsloth takes that trainer's place in a process that imports
it, so the files of `own_trl/` are run in processes without it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).with_name("own_trl").glob("*.py"))
ROOT = Path(__file__).parents[2]


def run_without_unsloth(arguments):
    """What pytest says of them, and its exit code."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("UNSLOTH", "PYTEST"))}
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_a_process_without_unsloth(file, tmp_path):
    code, said = run_without_unsloth([str(file), "--basetemp", str(tmp_path / "inner")])
    assert code == 0, said
    assert " passed" in said, said


@pytest.mark.long
def test_the_script_of_the_page(tmp_path):
    """docs/many_gpus.md, as a user runs it."""
    (script,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/many_gpus.md").read_text(), re.DOTALL
    )
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "script.py").write_text(script)
    environment = {n: v for n, v in os.environ.items() if not n.startswith("UNSLOTH")}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 1 < float(done.stdout.splitlines()[-1]) < 2


def test_there_are_files():
    assert {file.stem for file in FILES} >= {"losses", "choices", "guards", "head"}
