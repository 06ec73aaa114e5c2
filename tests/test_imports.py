"""What an import loads, and which names the package has.

What needs no model imports none: metrics, plots, grading and the command line start without torch.
"""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import sage_unsloth

PACKAGE = Path(sage_unsloth.__file__).parent
HEAVY = [
    "unsloth",
    "unsloth_zoo",
    "trl",
    "transformers",
    "peft",
    "datasets",
    "torch",
    "vllm",
    "matplotlib",
    "math_verify",
    "pandas",
    "sympy",
]
LIGHT = [
    "__main__",
    "evaluation.metrics",
    "figures",
    "front",
    "grading.grader",
    "evaluation.report",
    "sampling.record_sets",
    "problems.benchmarks",
    "runs.record",
    "planning.memory",
    "planning.plan",
    "problems.arithmetic",
    "doctor",
    "quickstart",
    "training.command",
    "evaluation.command",
    "analysis.command",
    "export.command",
    "planning.command",
    "trainers.trainer_names",
]
LIGHT_RESEARCH = ["cost.command", "cost.report"]
FOLDERS = sorted(
    ".".join(("sage_unsloth", *file.parent.relative_to(PACKAGE).parts))
    for file in PACKAGE.rglob("__init__.py")
)
STUBBED = [
    name for name in FOLDERS if (PACKAGE.parent / name.replace(".", "/") / "__init__.pyi").exists()
]
PUBLIC = {
    "sage_unsloth": """
        AdaptiveGuide BranchGuide ContractError CosineSchedule Grade Grader Guide
        RandomGuide Reward SolutionReward TeacherGuide TokenGuide TokenSignals __version__
        dynamic_sampling extract_answer get_verifier grade grpo_loss guided_kl k3 load_benchmark
        load_unsloth one_pass_loss pass_at_k
        load_policy load_dataset rewards preview grpo_config train evaluate compare
        LoraSettings choose_rollouts show_table
    """,
    "sage_unsloth.objective": """
        BranchGuide TokenGuide RandomGuide Guide SteeredGuide CosineSchedule TokenSignals k3
        grpo_loss
    """,
    "sage_unsloth.patch": """
        guided_kl one_pass_loss
    """,
    "sage_unsloth.trainers": """
        load_unsloth ContractError finite_only reproduce
    """,
    "sage_unsloth.methods": """
        AdaptiveGuide TeacherGuide dynamic_sampling add_rehearsal
    """,
    "sage_unsloth.grading": """
        Grade Grader Reward SolutionReward grade extract_answer get_verifier Checker
    """,
    "sage_unsloth.models": """
        load_policy LoraSettings
    """,
    "sage_unsloth.problems": """
        load_benchmark rl_corpus sft_corpus
    """,
    "sage_unsloth.sampling": """
        SamplingConfig sample_and_grade TransformersEngine VllmEngine
    """,
    "sage_unsloth.training": """
        RlvrConfig SftConfig rlvr sft Algorithm get_algorithm
    """,
    "sage_unsloth.evaluation": """
        pass_at_k pass_at_k_interval paired_difference evaluate_models compare_sets
    """,
}
"""What users import; it stays."""

LOADED = "import json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def loaded_by(statement):
    """The top-level names of the modules that are loaded after a statement in a fresh process."""
    command = [sys.executable, "-c", f"{statement}\n{LOADED}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return set(json.loads(lines[-1]))


def test_light_modules_load_nothing_heavy():
    """All in one process; which of them it was is looked for where one was."""
    modules = [
        *(f"sage_unsloth.{module}" for module in LIGHT),
        *(f"research.{module}" for module in LIGHT_RESEARCH),
    ]
    if loaded_by("\n".join(f"import {module}" for module in modules)) & set(HEAVY):
        found = {module: loaded_by(f"import {module}") & set(HEAVY) for module in modules}
        assert not any(found.values()), found


def test_names_of_the_package_load_their_own_module_alone():
    assert not loaded_by("from sage_unsloth import Grader, SolutionReward, pass_at_k") & set(HEAVY)
    guides = loaded_by("from sage_unsloth import BranchGuide, grpo_loss") & set(HEAVY)
    assert guides == {"torch"}


def test_folders_load_nothing_heavy():
    assert not loaded_by("\n".join(f"import {name}" for name in FOLDERS)) & {*HEAVY, "numpy"}


@pytest.mark.smoke
def test_help_is_printed_without_numerics():
    statement = (
        "import contextlib, sage_unsloth.__main__ as m\n"
        "with contextlib.suppress(SystemExit): m.main(['--help'])"
    )
    assert not loaded_by(statement) & {*HEAVY, "numpy", "scipy", "rich"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_names(folder):
    """Each is there, in the list that editors read, and is not shadowed by a module."""
    module = importlib.import_module(folder)
    assert module.__all__ == sorted(module.__all__) and set(module.__all__) <= set(dir(module))
    assert {*PUBLIC.get(folder, "").split()} <= set(module.__all__)
    path = PACKAGE.parent / folder.replace(".", "/")
    modules = {file.stem for file in path.glob("*.py")} | {
        file.parent.name for file in path.glob("*/__init__.py")
    }
    assert not set(module.__all__) & modules, "a function's module would take its name"
    for name in module.__all__:
        found = getattr(module, name)
        assert not isinstance(found, type(sys)), name
        home = getattr(found, "__module__", None)
        assert home is None or home.startswith(folder), f"{folder}.{name} is of {home}"
    assert not hasattr(module, "no_such_name")


@pytest.mark.parametrize("folder", STUBBED)
def test_the_list_for_editors_is_the_list_at_run_time(folder):
    stub = ast.parse((PACKAGE.parent / folder.replace(".", "/") / "__init__.pyi").read_text())
    listed = next(
        ast.literal_eval(node.value)
        for node in stub.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    imported = [
        alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert all(alias.asname == alias.name for alias in imported), "else it counts as private"
    assert listed == importlib.import_module(folder).__all__
    assert {alias.name for alias in imported} | {"__version__"} >= set(listed)


def test_the_version_is_that_of_pyproject():
    import tomllib

    pyproject = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert sage_unsloth.__version__ == pyproject["project"]["version"]
    assert (PACKAGE / "py.typed").is_file()


PROMISED = {
    "sage_unsloth": "load_benchmark Grade Grader grade grpo_loss k3 pass_at_k guided_kl "
    "load_unsloth SolutionReward TokenSignals CosineSchedule BranchGuide TokenGuide RandomGuide",
    "sage_unsloth.models": "load_policy LoraSettings",
    "sage_unsloth.prompts": "prompt_messages",
}


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_can_be_imported(module):
    loaded = importlib.import_module(module)
    missing = [name for name in PROMISED[module].split() if not hasattr(loaded, name)]
    assert missing == []
