"""The wheel: what it carries, and that it works beside no checkout.

Built from this checkout without build isolation, installed by `pip install --no-deps --target`,
and run by the packages of this environment, all without a network.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long
# What an editable install leaves in this environment would find the checkout: -S leaves it out, and
# this finds the rest.
RUN = """
import sys
site, *sys.argv[1:] = sys.argv[1:]
sys.path[:0] = [{target!r}, site]
import sage_unsloth
assert sage_unsloth.__file__.startswith({target!r}), sage_unsloth.__file__
import importlib.util
assert importlib.util.find_spec("research") is None
from sage_unsloth.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "-q", "-w", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """From a command's words to its output, by what the wheel installs, in an empty folder."""
    target, folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("empty")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
    done = subprocess.run([*command, "--target", str(target), str(wheel)], capture_output=True)
    assert done.returncode == 0, done.stderr
    script = folder / "installed.py"
    script.write_text(RUN.format(target=str(target)))
    site = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def call(*words, code=0):
        done = subprocess.run(
            [sys.executable, "-S", str(script), site, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    call.folder = folder
    return call


def test_it_carries_one_base_model_and_is_small(wheel):
    assert wheel.stat().st_size < 4 << 20
    names = zipfile.ZipFile(wheel).namelist()
    data = {name for name in names if name.startswith("sage_unsloth/data/")}
    assert data and {Path(name).parent.name for name in data} == {"arithmetic-base"}
    roots = {name.partition("/")[0] for name in names}
    assert roots == {"sage_unsloth", next(root for root in roots if root.endswith("dist-info"))}


def test_the_quickstart_and_the_doctor_run(run):
    run("quickstart", "--smoke", "--out", "quickstart")
    report = json.loads((run.folder / "quickstart" / "report.json").read_text())
    assert report["training"]["GRPO"]
    assert "embedded model" in run("doctor")


def test_train_and_evaluate_run(run):
    run("train", "--smoke", "--from", "arithmetic-base", "--algorithm", "grpo", "--out", "rl")
    run("evaluate", "--smoke", "--models", "rl=rl", "--benchmarks", "arithmetic", "--out", "out")
    assert (run.folder / "out" / "report.json").is_file()


def test_what_runs_from_a_clone_says_so(run):
    assert "run it from a clone: python -m research.cost" in run("cost", code=2)
