"""What needs no model imports none: metrics, plots, grading and the command line start without
torch.
"""

import json
import subprocess
import sys

import pytest

HEAVY = ("unsloth", "unsloth_zoo", "trl", "transformers", "peft", "datasets", "torch", "vllm", "matplotlib", "math_verify",
         "pandas", "sympy")  # fmt: skip
LIGHT = ("sage_unsloth", "sage_unsloth.__main__", "sage_unsloth.evaluation.metrics", "sage_unsloth.figures", "sage_unsloth.grading.grader",
         "sage_unsloth.evaluation.report", "sage_unsloth.sampling.record_sets", "sage_unsloth.problems.benchmarks", "sage_unsloth.runs.record",
         "sage_unsloth.planning.memory", "sage_unsloth.planning.plan", "sage_unsloth.problems.arithmetic", "sage_unsloth.doctor",
         "sage_unsloth.lab.cost.report", "sage_unsloth.lab.cost.run")  # fmt: skip
SCRIPT = (
    "import sys, json; {}; print(json.dumps(sorted({{name.split('.')[0] for name in "
    "sys.modules}})))"
)


def loaded_by(statement):
    command = [sys.executable, "-c", SCRIPT.format(statement)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return set(json.loads(lines[-1]))


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_loads_nothing_heavy(module):
    assert not loaded_by(f"import {module}") & set(HEAVY)


def test_names_of_the_package_load_their_own_module_alone():
    assert not loaded_by("from sage_unsloth import Grader, SolutionReward, pass_at_k") & set(HEAVY)
    guides = loaded_by("from sage_unsloth import BranchGuide, grpo_loss") & set(HEAVY)
    assert guides == {"torch"}


@pytest.mark.smoke
def test_help_is_printed_without_torch():
    statement = (
        "import contextlib, sage_unsloth.__main__ as m\n"
        "with contextlib.suppress(SystemExit): m.main(['--help'])\nimport sys"
    )
    assert not loaded_by(statement) & set(HEAVY)
