"""Disk errors with what is wrong and how to resume."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)
NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)


class StorageError(OSError):
    """The disk refuses a write; earlier writes are still there."""

    def __str__(self) -> str:
        return str(self.strerror)  # without the system's number, which means nothing to a reader


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns any disk error into a StorageError with rule, value and fix.

    Args:
        path: named if the error names no file.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("sage_unsloth"):
            raise  # it has its own remedy, and may quote the disk
        number = _disk_error(error)
        named = getattr(error, "filename", None) or path
        if number in DISK_FULL:
            rule, fact = "the disk must have room for what a run writes", "does not fit"
            remedy = (
                "Free some space and run the same command again: it resumes from what is on disk"
            )
        elif number in DENIED:
            rule, fact = "a run must be allowed to write to its folder", "refuses"
            remedy = "Change its permissions, or choose another --out"
        elif number in NO_FOLDER:
            rule, fact = "a run's folder, and what it lies in, must be folders", "is not"
            remedy = "Move the file that is in its place, or choose another --out"
        else:
            raise
        text = f"{rule}, but {named} {fact} ({os.strerror(number)}). {remedy}"
        raise StorageError(number, text) from error


def check_room(folder: str | Path, needed: int) -> None:
    """Raises StorageError if the disk is too small.

    Args:
        folder: of the run, which may not exist yet.
        needed: bytes of everything that it will hold at once, existing files included.
    """
    folder = Path(folder).absolute()
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free, needed = shutil.disk_usage(there).free, needed - held
    if needed > free:
        raise StorageError(
            errno.ENOSPC,
            f"the disk must have room for the run: {folder} needs {needed / 1e9:.1f} GB more, and "
            f"{free / 1e9:.1f} GB are free. Free some space, or choose another --out",
        )


def _disk_error(error: Exception) -> int | None:
    """The system's error number, or None.

    PyTorch and safetensors write without Python, and have the number in their text, or none.
    """
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    if match:
        return int(match[1])
    # PyTorch does not say why its writer failed; a path that it may not open has another text.
    return errno.ENOSPC if re.search("PytorchStreamWriter|unexpected pos", str(error)) else None
