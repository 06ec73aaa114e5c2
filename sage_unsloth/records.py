"""What a run leaves on disk: files that survive a kill, and `run.json`, which says what it was."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

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

logger = logging.getLogger(__name__)


def write_json(path: str | Path, data) -> None:
    """`write_text` of `data` as JSON."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes `text` so that a reader, or a kill at any time, finds the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # same folder: replace is atomic
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)  # the new name itself must survive a power cut


def read_json(path: str | Path) -> dict:
    """The object that a file holds which `write_json` wrote.

    Raises:
        ValueError: it holds something else; no kill leaves that, since the file is replaced whole.
    """
    path = Path(path)
    content = path.read_bytes()
    found = _row(content)
    if found is None:
        raise ValueError(
            f"{path} must hold one JSON object; it "
            + (f"begins with {content[:40]!r}" if content else "is empty")
            + "; it was damaged from outside, since it is only ever replaced whole: put back a copy, or choose another --out"
        )
    return found


def sync(path: str | Path) -> None:
    """Waits until the disk has a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_folder(folder: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A path to write a folder to, which gets its own name once the disk has every file: there whole, or not at all.

        with whole_folder(run / "adapter") as partial:
            model.save_pretrained(partial)

    The path is `<name>.partial` beside it, not made yet. An error takes it away; what a kill leaves of it, the next run does.

    Args:
        replace: a folder of that name gives way; between two renames neither has the name, and the old is `<name>.old`.
    """
    folder = Path(folder).absolute()
    partial, old = (folder.with_name(f"{folder.name}.{end}") for end in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        for path in partial.rglob("*"):
            sync(path)
        sync(partial)
        if replace:
            shutil.rmtree(old, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, old)
        os.rename(partial, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if replace:
        shutil.rmtree(old, ignore_errors=True)


def append_jsonl(path: str | Path, rows: Iterable[dict]) -> None:
    """Appends one line per row and waits until the disk has them; first mends a line cut short."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with Path(path).open("a+b") as file:
        _mend_last_line(file)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _mend_last_line(file) -> None:
    """Ends the last line if it is a whole row, cuts it off if a kill cut it short."""
    end = file.seek(0, os.SEEK_END)
    tail, start = b"", end
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65_536)
        file.seek(start)
        tail = file.read(end - start)
    tail = tail[tail.rfind(b"\n") + 1 :]
    if tail and _row(tail) is None:
        file.truncate(end - len(tail))
    elif tail:
        file.write(b"\n")


def _row(line: bytes) -> dict | None:
    """The row that a line holds; a cut line holds none, because no prefix of an object is one."""
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None


def read_jsonl(path: str | Path) -> list[dict]:
    """The rows of a file; a last line that a kill cut short is dropped.

    Raises:
        ValueError: any other line is not one JSON object.
    """
    *lines, last = Path(path).read_bytes().split(b"\n")
    rows = [_row(line) for line in lines]
    if None in rows:
        number = rows.index(None) + 1
        raise ValueError(
            f"every line must be one JSON object; got {lines[number - 1][:80]!r} in line {number} "
            f"of {path}; repair or delete that line"
        )
    last_row = _row(last)
    return rows if last_row is None else [*rows, last_row]


def runs_folder() -> Path:
    """Where notebooks keep their runs: Google Drive on Colab once it is mounted, /kaggle/working on Kaggle, `runs` elsewhere.

    On Colab without Drive, a warning: what is written there is gone when the runtime ends.
    """
    drive, kaggle = Path("/content/drive/MyDrive"), Path("/kaggle/working")
    if drive.is_dir():
        return drive / "sage_unsloth"
    if kaggle.is_dir():
        return kaggle / "runs"
    if "COLAB_RELEASE_TAG" in os.environ:
        logger.warning(
            "Colab forgets its disk when the runtime ends: mount Google Drive first (from google.colab import drive; "
            'drive.mount("/content/drive")), and run this cell again'
        )
    return Path("runs")


class HeldError(ValueError):
    """Another process holds a file or folder."""


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Holds a file or folder for this process alone, by a lock on `.<name>.lock` beside it.

    The system drops the lock when its process ends, however it ends; the lock file stays and means nothing.

    Raises:
        HeldError: another process holds it.
        StorageError: what is written meanwhile does not fit on the disk, or may not be written; see `disk_errors`.
    """
    path = Path(path).resolve()
    with contextlib.ExitStack() as held:
        held.enter_context(disk_errors(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(path.with_name(f".{path.name}.lock").open("a+"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise HeldError(
                f"one process at a time may write to {path}; {file.read().strip() or 'another one'} does; "
                "wait for it to end, or end it"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logger.warning(
                "%s: this file system knows no locks; start no second process on it", path
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


class StorageError(OSError):
    """The disk does not take what a run writes; what it took before is still there."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)
NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an error of the disk, whoever writes, into one that says what is the matter and how the run goes on.

    Raises:
        StorageError: in the place of that error.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("sage_unsloth"):
            raise  # it says what to do, and may quote the disk
        number = _disk_error(error)
        named = getattr(error, "filename", None) or path
        if number in FULL:
            text = (
                f"the disk must have room for what a run writes; {named} does not fit ({os.strerror(number)}); free some space "
                "and run the same command again: it goes on from what is on disk"
            )
        elif number in DENIED:
            text = (
                f"a run must be allowed to write to its folder; {named} refuses ({os.strerror(number)}); change its permissions, "
                "or choose another --out"
            )
        elif number in NO_FOLDER:
            text = (
                f"a run's folder, and what it lies in, must be folders; {named} is not ({os.strerror(number)}); move the file "
                "that is in its place, or choose another --out"
            )
        else:
            raise
        raise StorageError(number, text) from error


def _disk_error(error: Exception) -> int | None:
    """The system's number of an error; PyTorch and safetensors, which write without Python, have theirs in the text, or none."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found:
        return int(found[1])
    # PyTorch does not say why its writer failed; a path that it may not open has another text.
    return errno.ENOSPC if re.search("PytorchStreamWriter|unexpected pos", str(error)) else None


def environment() -> dict:
    """Where a run happens: versions (None where a package is missing), machine, date, commit.

    PyTorch is not imported: versions are read from the installed packages' metadata.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES},
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


def _commit() -> str | None:
    """This checkout's commit, "-dirty" behind it if tracked files changed; None if installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # else somebody else's repository
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def open_run(folder: str | Path, settings: dict, *, begun: bool = True, **notes: object) -> Path:
    """The folder of a run, new or resumed; `run.json` in it holds its settings and environment.

    Args:
        folder: made if absent.
        settings: what a run that goes on in this folder must agree in.
        begun: whether anything was made under the recorded settings; else the new ones take their place.
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
    strangers = [path.name for path in folder.iterdir() if not path.name.startswith(".run.json.")]
    if strangers:
        raise ValueError(
            f"a run's folder must be empty or hold run.json; {folder} holds {min(strangers)!r} "
            "and no run.json; choose another --out"
        )
    write_json(record, {"settings": settings, "environment": environment()} | notes)
    return folder


def refuse_other_settings(folder: Path, recorded: dict, settings: dict) -> None:
    """Raises ValueError naming every setting in which a run on disk differs from this one."""
    differences = _differences(recorded, settings)
    if differences:
        raise ValueError(
            f"a run is resumed with its own settings only; in {folder}: {'; '.join(differences)}; "
            "choose another --out, or delete the folder"
        )


def _warn_of_other_versions(folder: Path, recorded: dict, current: dict) -> None:
    before, now = ({"python": env["python"], **env["packages"]} for env in (recorded, current))
    for difference in _differences(before, now):
        logger.warning("%s is resumed in another environment: %s", folder, difference)


def _differences(recorded: dict, current: dict) -> list[str]:
    """One text per setting, "stage.name", whose JSON differs; comparing texts makes NaN equal to itself."""
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
