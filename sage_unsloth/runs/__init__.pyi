from .files import read_jsonl as read_jsonl
from .record import open_run as open_run

__all__ = [
    "open_run",
    "read_jsonl",
]
