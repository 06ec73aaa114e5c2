"""One process at a time writes to a run's file or folder."""

import contextlib
import errno
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from sage_unsloth.runs.storage import disk_errors

logger = logging.getLogger(__name__)


class HeldError(ValueError):
    """Another process holds a file or folder."""


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Holds a file or folder for this process alone, by a lock on `.<name>.lock` beside it.

    The system drops the lock when its process ends, however it ends; the lock file stays and means
    nothing.

    Raises:
        HeldError: another process holds it.
        StorageError: what is written meanwhile does not fit on the disk, or may not be written; see
            `disk_errors`.
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
                f"one process at a time may write to {path}; "
                f"{file.read().strip() or 'another one'} does; "
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
