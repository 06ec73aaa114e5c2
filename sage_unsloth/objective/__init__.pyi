from .adaptive import AdaptiveGuide as AdaptiveGuide
from .guides import BranchGuide as BranchGuide
from .guides import Guide as Guide
from .guides import RandomGuide as RandomGuide
from .guides import SteeredGuide as SteeredGuide
from .guides import TokenGuide as TokenGuide
from .kl import k3 as k3
from .loss import grpo_loss as grpo_loss
from .schedule import CosineSchedule as CosineSchedule
from .signals import TokenSignals as TokenSignals
from .teacher_guide import TeacherGuide as TeacherGuide

__all__ = [
    "AdaptiveGuide",
    "BranchGuide",
    "CosineSchedule",
    "Guide",
    "RandomGuide",
    "SteeredGuide",
    "TeacherGuide",
    "TokenGuide",
    "TokenSignals",
    "grpo_loss",
    "k3",
]
