from .loading import LoraSettings as LoraSettings
from .loading import load_policy as load_policy
from .trained import read_run as read_run

__all__ = [
    "LoraSettings",
    "load_policy",
    "read_run",
]
