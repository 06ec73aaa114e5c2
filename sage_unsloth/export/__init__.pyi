from .exporter import export as export
from .hub import push as push

__all__ = [
    "export",
    "push",
]
