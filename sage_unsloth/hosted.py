"""Installs this package in a notebook, changing as little of its image as possible.

    from sage_unsloth import hosted
    hosted.install(vllm=True)

Colab and Kaggle have a PyTorch that fits their driver, and a kernel that has already loaded some
packages. `choose` decides from the result of `look`; `install` runs pip. This module imports only
what every notebook's image has, because it runs before anything is installed: it and `lazy_loader`
are installed without dependencies in the cell above.
"""

import importlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sage_unsloth.models.device import Card, compiled_architecture, nvidia_cards, why_unserved
from sage_unsloth.sampling.engine_choice import VLLM_CAPABILITY

IMAGE_PACKAGES = ("numpy", "pillow", "torch", "torchvision", "torchaudio")
"""Packages of the image that pip may not replace if their versions suffice."""
VLLM_REPLACES = frozenset(IMAGE_PACKAGES) - {"numpy"}
"""Those of `IMAGE_PACKAGES` that the vllm extra replaces."""
CUDA_13_DRIVER = 580
"""The oldest NVIDIA driver for CUDA 13, which PyPI's PyTorch uses from 2.11 on."""

logger = logging.getLogger(__name__)


class InWordsError(RuntimeError):
    """Ends a notebook's run with its message only: IPython shows no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class InstallError(InWordsError):
    """The machine, or pip, does not allow the package to run."""


class RestartNeededError(InWordsError):
    """A package that this process has loaded was replaced on the disk."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides the installation.

    Attributes:
        packages: canonical names of installed distributions -> versions.
        driver: major version of NVIDIA's driver; None without one.
        arches: what the installed PyTorch is compiled for, such as "sm_80"; empty without PyTorch
            or CUDA.
    """

    packages: Mapping[str, str]
    cards: tuple[Card, ...] = ()
    driver: int | None = None
    arches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InstallPlan:
    """pip's requirements and constraints, and the reasons."""

    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    reasons: tuple[str, ...]


def runs_folder() -> Path:
    """The folder of runs in a notebook.

    Google Drive on Colab once it is mounted, /kaggle/working on Kaggle, `runs` elsewhere. Colab
    without Drive logs a warning: its files are lost when the runtime ends.
    """
    drive, kaggle = Path("/content/drive/MyDrive"), Path("/kaggle/working")
    if drive.is_dir():
        return drive / "sage_unsloth"
    if kaggle.is_dir():
        return kaggle / "runs"
    if "COLAB_RELEASE_TAG" in os.environ:
        logger.warning(
            "Colab forgets its disk when the runtime ends: mount Google Drive first "
            '(`drive.mount("/content/drive")` of google.colab), and run this cell again'
        )
    return Path("runs")


def install(*, vllm: bool = False, say: Callable[[str], None] = print) -> None:
    """Installs what is missing; a second call does nothing.

    Args:
        vllm: with vLLM, where it runs.
        say: called with each decision and its reason.

    Raises:
        InstallError: an unsupported GPU, or pip failed.
        RestartNeededError: a package was replaced that the kernel had loaded.
    """
    machine = look()
    if len(machine.cards) > 1:
        _take_one_card(machine, say)
    expected = requirements()
    lacking = [text for text in expected if not _is_met(text, machine.packages)]
    if lacking:
        if vllm:
            expected += requirements("vllm")
        choice = choose(machine, expected)
        for reason in choice.reasons:
            say(reason)
        say(f"Installing {', '.join(lacking)} (a few minutes).")
        _run_pip(choice)
    replaced = _replaced_versions()
    if replaced:
        raise RestartNeededError(
            "Installed. Please restart the kernel once, then run all cells again (Colab: Runtime > "
            "Restart session and run all. Kaggle: Run > Restart & clear cell outputs, then Run "
            f"All). It had loaded packages that have new versions now: {', '.join(replaced)}."
        )
    if lacking:
        say("Installed. Nothing that was loaded has changed, so no restart is needed.")


def choose(machine: Machine, expected: Iterable[str]) -> InstallPlan:
    """What to install on a machine.

    vLLM is left out if its pinned release does not run. Versions of `IMAGE_PACKAGES` that meet the
    requirements are kept.

    Args:
        expected: of `requirements`.

    Raises:
        InstallError: a GPU that Unsloth, or the installed PyTorch, does not support.
    """
    expected, reasons = tuple(expected), []
    keeps_torch = _serves("torch", machine, expected)
    for card in machine.cards:
        _check_card(card, machine.arches if keeps_torch else ())
    if machine.cards and not keeps_torch and (machine.driver or 0) < CUDA_13_DRIVER:
        raise InstallError(
            f"PyTorch must be {_specifier('torch', expected)}, which needs NVIDIA's driver "
            f"{CUDA_13_DRIVER} or newer, got PyTorch {machine.packages.get('torch')} and driver "
            f"{machine.driver}. Use a newer image (Kaggle: Settings > Environment), or install a "
            "PyTorch of that version for this driver first (pytorch.org)"
        )
    selected = (
        set(IMAGE_PACKAGES)
        if keeps_torch
        else set(IMAGE_PACKAGES) - {"torch", "torchvision", "torchaudio"}
    )
    if any(Requirement(text).name == "vllm" for text in expected):
        reason = _why_no_vllm(machine)
        if reason is None:
            selected -= VLLM_REPLACES
        else:
            expected = tuple(text for text in expected if Requirement(text).name != "vllm")
            reasons.append(f"Without vLLM (completions are sampled by transformers): {reason}.")
    constraints = tuple(
        f"{name}=={machine.packages[name]}"
        for name in IMAGE_PACKAGES
        if name in selected and _serves(name, machine, expected)
    )
    reasons.append(f"Kept as they are: {', '.join(constraints) or 'nothing'}.")
    return InstallPlan(requirements=expected, constraints=constraints, reasons=tuple(reasons))


def _check_card(card: Card, arches: tuple[str, ...]) -> None:
    reason = why_unserved(card.capability, arches)
    if reason is not None:
        raise InstallError(
            f"{card.name} cannot be used: {reason}. Use another one (T4 on Colab, T4 x2 on "
            "Kaggle), or none: the embedded model needs no GPU"
        )


def _why_no_vllm(machine: Machine) -> str | None:
    if not machine.cards:
        return "there is no GPU"
    oldest = min(machine.cards, key=lambda card: card.capability)
    if oldest.capability < VLLM_CAPABILITY:
        return (
            f"the pinned release needs compute capability {VLLM_CAPABILITY[0]}."
            f"{VLLM_CAPABILITY[1]}, and {oldest.name} has {oldest.capability[0]}."
            f"{oldest.capability[1]}"
        )
    if (machine.driver or 0) < CUDA_13_DRIVER:
        return (
            f"its PyTorch needs NVIDIA's driver {CUDA_13_DRIVER} or newer, and this one is "
            f"{machine.driver}"
        )
    return None


def requirements(extra: str | None = None) -> tuple[str, ...]:
    """The requirements in the package's metadata, or those of one of its extras."""
    results = []
    for text in metadata.requires("sage_unsloth") or []:
        requirement = Requirement(text)
        marker, requirement.marker = requirement.marker, None
        if marker is None:
            chosen = extra is None
        elif "extra" in str(marker):
            chosen = extra is not None and marker.evaluate({"extra": extra})
        else:
            chosen = extra is None and marker.evaluate()
        if chosen:
            results.append(str(requirement))
    return tuple(results)


def look() -> Machine:
    """This machine's packages and GPUs, without loading PyTorch, which may still be replaced."""
    packages = _installed_versions()
    cards, driver = nvidia_cards()
    arches = compiled_architecture() if cards and "torch" in packages else ()
    return Machine(packages=packages, cards=cards, driver=driver, arches=arches)


def _take_one_card(machine: Machine, say: Callable[[str], None]) -> None:
    """Shows this process only the first GPU, unless one was chosen."""
    if "CUDA_VISIBLE_DEVICES" in os.environ or "torch" in sys.modules:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    say(
        f"{len(machine.cards)} GPUs: this notebook takes the first. For RL on all of them: "
        f"!CUDA_VISIBLE_DEVICES={','.join(map(str, range(len(machine.cards))))} torchrun "
        f"--nproc-per-node {len(machine.cards)} -m sage_unsloth train ... (never tried on GPUs)"
    )


def _run_pip(choice: InstallPlan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kept.txt"
        file.write_text("\n".join(choice.constraints) + "\n")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "-c", str(file), *choice.requirements],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise InstallError(
            f"pip failed: {(done.stdout + done.stderr)[-2000:].strip()}. docs/hosted.md lists the "
            "images that were checked"
        )
    importlib.invalidate_caches()


def _is_met(text: str, packages: Mapping[str, str]) -> bool:
    requirement = Requirement(text)
    version = packages.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _serves(name: str, machine: Machine, expected: Iterable[str]) -> bool:
    """Whether the installed version of a package meets its requirements."""
    if name not in machine.packages:
        return False
    texts = [text for text in expected if canonicalize_name(Requirement(text).name) == name]
    return all(_is_met(text, machine.packages) for text in texts)


def _specifier(name: str, expected: Iterable[str]) -> str:
    return next(
        (str(r.specifier) for r in map(Requirement, expected) if canonicalize_name(r.name) == name),
        "of any version",
    )


def _installed_versions() -> dict[str, str]:
    """Distributions -> versions; of duplicates the one that Python imports."""
    result: dict[str, str] = {}
    for distribution in metadata.distributions():
        if distribution.name:
            result.setdefault(canonicalize_name(distribution.name), distribution.version)
    return result


def _loaded_versions() -> dict[str, str]:
    """Loaded distributions -> their versions on disk."""
    top_level = {name.partition(".")[0] for name in list(sys.modules)}
    names = {
        name
        for module, result in metadata.packages_distributions().items()
        if module in top_level
        for name in result
    }
    installed = _installed_versions()
    return {name: installed[name] for name in map(canonicalize_name, names)}


def _replaced_versions() -> list[str]:
    """Distributions that were loaded with this module and now have another version on disk."""
    now = _installed_versions()
    return [
        f"{name} {version} -> {now.get(name, 'removed')}"
        for name, version in sorted(_LOADED.items())
        if now.get(name) != version
    ]


_LOADED = _loaded_versions()
