from .guides import BranchGuide as BranchGuide
from .guides import RandomGuide as RandomGuide
from .guides import TokenGuide as TokenGuide
from .kl import k3 as k3
from .loss import grpo_loss as grpo_loss
from .protocols import CausalGuide as CausalGuide
from .protocols import Guide as Guide
from .protocols import SteeredGuide as SteeredGuide
from .schedule import CosineSchedule as CosineSchedule
from .signals import TokenSignals as TokenSignals

__all__ = [
    "BranchGuide",
    "CausalGuide",
    "CosineSchedule",
    "Guide",
    "RandomGuide",
    "SteeredGuide",
    "TokenGuide",
    "TokenSignals",
    "grpo_loss",
    "k3",
]
