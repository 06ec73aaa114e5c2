"""Files and folders that survive a kill at any moment: complete, or absent."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


def write_json(path: str | Path, data: Any) -> None:
    """`write_text` of `data` as JSON."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes `text` so that readers, also after a kill, see the old file or the new one."""
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
    """The object written by `write_json`; ValueError for other content, which no kill can cause."""
    path = Path(path)
    content = path.read_bytes()
    result = _row(content)
    if result is None:
        raise ValueError(
            f"{path} must hold one JSON object, but it "
            + (f"begins with {content[:40]!r}" if content else "is empty")
            + ". Put back a copy, or choose another --out"
        )
    return result


def sync(path: str | Path) -> None:
    """Waits until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_modes(folder: Path) -> None:
    """Gives the files of a folder the permissions of the user's umask.

    Some writers (safetensors) create a file that only its owner may read, and rename it.
    """
    mode = folder.stat().st_mode & 0o666  # a folder's bits without those to enter it
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


@contextlib.contextmanager
def whole_folder(folder: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A path to write a folder to, which gets its name once every file is on disk.

        with whole_folder(run / "adapter") as partial:
            model.save_pretrained(partial)

    The path, `<name>.partial`, does not exist yet. An error deletes it; after a kill the next run
    does.

    Args:
        replace: replaces an existing folder, which is `<name>.old` between the two renames.
    """
    folder = Path(folder).absolute()
    partial, old = (folder.with_name(f"{folder.name}.{end}") for end in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        set_modes(partial)
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
    """Appends one line per row and waits for the disk; first repairs a truncated line."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with Path(path).open("a+b") as file:
        _mend_last_line(file)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: str | Path) -> list[dict]:
    """The rows of a file; a truncated last line is dropped.

    Raises:
        ValueError: any other line is not one JSON object.
    """
    *lines, last = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None:
            raise ValueError(
                f"every line must be one JSON object, got {line[:80]!r} in line {number} of "
                f"{path}. Repair or delete that line"
            )
        rows.append(row)
    last_row = _row(last)
    return rows if last_row is None else [*rows, last_row]


def _mend_last_line(file: BinaryIO) -> None:
    """Ends the last line if it is a whole row, removes it if it is truncated."""
    # A line may be long, so it is looked for from the end, 64 KiB at a time.
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
    """The row in a line; None for a truncated line, because no prefix of an object is one."""
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
