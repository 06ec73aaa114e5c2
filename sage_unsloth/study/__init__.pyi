from .crossed import CrossedEstimate as CrossedEstimate
from .crossed import crossed_interval as crossed_interval
from .points import Point as Point
from .runner import study as study
from .tasks import Task as Task

__all__ = [
    "CrossedEstimate",
    "Point",
    "Task",
    "crossed_interval",
    "study",
]
