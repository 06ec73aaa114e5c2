from .adaptive import AdaptiveGuide as AdaptiveGuide
from .composed import with_methods as with_methods
from .credit import credit_sequences as credit_sequences
from .group_rewards import advantages_by as advantages_by
from .kl_reward import kl_in_reward as kl_in_reward
from .own_penalty import kl_penalty as kl_penalty
from .rehearsal import Stored as Stored
from .rehearsal import rehearsed as rehearsed
from .resampling import dynamic_sampling as dynamic_sampling
from .teacher_guide import TeacherGuide as TeacherGuide
from .token_rules import token_advantages_by as token_advantages_by

__all__ = [
    "AdaptiveGuide",
    "Stored",
    "TeacherGuide",
    "advantages_by",
    "credit_sequences",
    "dynamic_sampling",
    "kl_in_reward",
    "kl_penalty",
    "rehearsed",
    "token_advantages_by",
    "with_methods",
]
