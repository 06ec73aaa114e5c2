from .loading import load_policy as load_policy
from .lora import LoraSettings as LoraSettings
from .trained import read_run as read_run

__all__ = [
    "LoraSettings",
    "load_policy",
    "read_run",
]
