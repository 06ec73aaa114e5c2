"""The workflows of GitHub: valid by its schema, and the same checks as `.ci/run`."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def check(*files):
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *files]
    return subprocess.run(command, capture_output=True, text=True)


def test_workflows_are_valid(tmp_path):
    assert WORKFLOWS and check(*WORKFLOWS).returncode == 0
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[-1].read_text().replace("runs-on:", "runs_on:"))
    assert check(broken).returncode == 1


def test_the_tests_workflow_runs_what_ci_runs():
    (jobs,) = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())[
        "jobs"
    ].values()
    assert jobs["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    lines = [line for step in jobs["steps"] for line in step.get("run", "").splitlines()]
    ours = [line for line in lines if line.startswith((".venv/bin/", "line=", "test -n", "eval"))]
    assert len(ours) == 9
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ours if line not in ci] == []


@pytest.mark.parametrize("name", ["ruff check", "lint-imports", "pyright", "docs/tables.py"])
def test_short_checks_are_in_the_workflow(name):
    assert name in (ROOT / ".github" / "workflows" / "tests.yml").read_text()
