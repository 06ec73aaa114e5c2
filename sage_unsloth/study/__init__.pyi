from .corrections import holm as holm
from .crossed import CrossedEstimate as CrossedEstimate
from .crossed import crossed_interval as crossed_interval

__all__ = [
    "CrossedEstimate",
    "crossed_interval",
    "holm",
]
