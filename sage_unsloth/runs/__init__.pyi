from .files import read_jsonl as read_jsonl
from .record import open_run as open_run
from .record import runs_folder as runs_folder

__all__ = [
    "open_run",
    "read_jsonl",
    "runs_folder",
]
