"""One process at a time writes to a run's file or folder."""

import contextlib
import errno
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from sage_unsloth.runs.storage import disk_errors

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class HeldError(ValueError):
    """Another process holds a file or folder."""


@contextlib.contextmanager
def exclusive_lock(path: str | Path) -> Iterator[None]:
    """Holds a file or folder for this process, by a lock on `.<name>.lock` next to it.

    It does not wait. The system releases the lock when the process ends in any way; the lock file
    stays and means nothing by itself.

    Raises:
        HeldError: another process holds it.
        StorageError: a disk error inside the context; see `disk_errors`.
    """
    path = Path(path).resolve()
    file = path.with_name(f".{path.name}.lock")
    # By default filelock would replace a lock that the file system does not support by the mere
    # existence of a file, and a killed process leaves that behind.
    lock = FileLock(
        file,
        blocking=False,
        thread_local=False,
        fallback_to_soft=False,
        on_acquired=_write_holder,
    )
    with contextlib.ExitStack() as held:
        held.enter_context(disk_errors(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held.enter_context(lock)
        except Timeout:
            raise HeldError(
                f"one process at a time may write to {path}, and {_read_holder(file)} does. Wait "
                "for it, or end it"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.warning(
                "%s: this file system does not support locks. Start no second process on it", path
            )
        yield


def _write_holder(descriptor: int) -> None:
    """Writes the name of this process to the lock file, for the message of a refused one."""
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())


def _read_holder(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip() or "another process"
