"""Which functions of the package touch tensors, by their source, and which of them have run."""

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sage_unsloth

ROOT = Path(sage_unsloth.__file__).parent
PACKAGES = ("objective", "methods", "patch", "trainers")
TOUCHES = {"torch", "Tensor", "TokenSignals"}
OF_TRL = "trl_"
"""Files of TRL's own trainer, which tests/patch/own_trl/devices.py runs without Unsloth."""
CONTRACT = "the contract, whose own tensors are on the CPU"
ELSEWHERE = {
    "check_rule": "rewards made up on the CPU, before training",
    "AdvantageRule.silent_counts": "rewards made up on the CPU, before training",
    "_checked_function": "looks at a signature",
    "_checked_k": "looks at a shape",
    "Guide.log_guide": "a protocol",
    "Scoring.score_with_entropies": "a protocol",
    "Scoring.in_completion_layout": "a protocol",
    "load_unsloth": "imports",
    "keep_one_library": "imports",
    "head_without_gpu": "is for the CPU",
    "_PlainHead.apply": "is for the CPU",
    "_PassByPass.__iter__": "a sampler's generator, on the CPU everywhere",
    "check_numbers": CONTRACT,
    "check_ratio.<locals>.bounded_after": CONTRACT,
    "run_of_unsloth": CONTRACT,
    "run_of_unsloth.<locals>.run": CONTRACT,
    "run_of_trl": CONTRACT,
    "run_of_trl.<locals>.run": CONTRACT,
    "check_trl": CONTRACT,
    "Seam.install_hook": "a protocol",
    "_stand_in": CONTRACT,
    "_stand_in.<locals>.score": CONTRACT,
    "_stand_in.<locals>.same": CONTRACT,
    "_inside_trl": "TRL's own trainer: tests/patch/own_trl/devices.py, credit",
    "_inside_trl.<locals>.compute_loss": "TRL's own trainer, as above",
    "_compiled": "compiles; the function that it compiles has run",
    "reproduce": "safetensors reads to the device itself",
    "check_same_gradients": "several processes: tests/training/test_distributed.py",
    "_copies_for_the_engine": "vLLM on a GPU: `doctor --deep`, vLLM",
    "_copies_for_the_engine.<locals>.with_copies": "vLLM on a GPU: `doctor --deep`, vLLM",
}
"""Functions that need not run on the GPU here, and why."""


def public_names() -> dict[str, list]:
    """Every public function and class of the packages by its name, so that a case does not know in
    which file it is.
    """
    names: dict[str, list] = {}
    for package in PACKAGES:
        if not (ROOT / package).is_dir():
            continue
        for info in pkgutil.walk_packages([str(ROOT / package)], f"sage_unsloth.{package}."):
            if OF_TRL in info.name:
                continue
            for name, value in vars(importlib.import_module(info.name)).items():
                if getattr(value, "__module__", None) == info.name:
                    names.setdefault(name, []).append(value)
    return names


def all_functions(*, of_trl: bool = False) -> set[tuple[str, str]]:
    """(file, qualified name) of every function that touches tensors."""
    files = [file for package in PACKAGES for file in (ROOT / package).glob("**/*.py")]
    return {
        (str(file.relative_to(ROOT)), name)
        for file in files
        if file.name.startswith(OF_TRL) == of_trl
        for name in _functions_of(ast.parse(file.read_text(encoding="utf-8")), "")
    }


def _functions_of(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if {n.id for n in ast.walk(child) if isinstance(n, ast.Name)} & TOUCHES:
                yield prefix + child.name
            yield from _functions_of(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions_of(child, f"{prefix}{child.name}.")
        else:
            yield from _functions_of(child, prefix)


@contextmanager
def recorded(ran: set[tuple[str, str]]) -> Iterator[None]:
    """Adds (file, qualified name) of every function of the package that is called."""
    root = f"{ROOT}/"

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            ran.add((code.co_filename.removeprefix(root), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
