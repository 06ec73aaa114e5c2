from .adaptive import AdaptiveGuide as AdaptiveGuide
from .rehearsal import Stored as Stored
from .rehearsal import rehearsed as rehearsed
from .resampling import dynamic_sampling as dynamic_sampling
from .teacher_guide import TeacherGuide as TeacherGuide

__all__ = [
    "AdaptiveGuide",
    "Stored",
    "TeacherGuide",
    "dynamic_sampling",
    "rehearsed",
]
