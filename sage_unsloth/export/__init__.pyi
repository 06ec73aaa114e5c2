from .exporter import export as export
from .exporter import read_run as read_run
from .hub import push as push

__all__ = [
    "export",
    "push",
    "read_run",
]
