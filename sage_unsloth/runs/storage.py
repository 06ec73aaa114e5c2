"""Errors of the disk, turned into ones that say what is the matter and how the run resumes."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path


class StorageError(OSError):
    """The disk does not take what a run writes; what it took before is still there."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)


NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an error of the disk, whoever writes, into one that says what is the matter and how the
    run goes on.

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
                f"the disk must have room for what a run writes; {named} does not fit "
                f"({os.strerror(number)}); free some space "
                "and run the same command again: it goes on from what is on disk"
            )
        elif number in DENIED:
            text = (
                f"a run must be allowed to write to its folder; {named} refuses "
                f"({os.strerror(number)}); change its permissions, "
                "or choose another --out"
            )
        elif number in NO_FOLDER:
            text = (
                f"a run's folder, and what it lies in, must be folders; {named} is not "
                f"({os.strerror(number)}); move the file "
                "that is in its place, or choose another --out"
            )
        else:
            raise
        raise StorageError(number, text) from error


def _disk_error(error: Exception) -> int | None:
    """The system's number of an error; PyTorch and safetensors, which write without Python, have
    theirs in the text, or none.
    """
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found:
        return int(found[1])
    # PyTorch does not say why its writer failed; a path that it may not open has another text.
    return errno.ENOSPC if re.search("PytorchStreamWriter|unexpected pos", str(error)) else None
