from .loading import LoraSettings as LoraSettings
from .loading import load_policy as load_policy

__all__ = [
    "LoraSettings",
    "load_policy",
]
