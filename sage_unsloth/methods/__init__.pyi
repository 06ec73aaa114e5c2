from .adaptive import AdaptiveGuide as AdaptiveGuide
from .composed import with_methods as with_methods
from .credit import credit_sequences as credit_sequences
from .group_rewards import use_advantages as use_advantages
from .kl_reward import kl_in_reward as kl_in_reward
from .own_penalty import kl_penalty as kl_penalty
from .rehearsal import Stored as Stored
from .rehearsal import add_rehearsal as add_rehearsal
from .resampling import dynamic_sampling as dynamic_sampling
from .teacher_guide import TeacherGuide as TeacherGuide
from .token_rules import use_token_advantages as use_token_advantages

__all__ = [
    "AdaptiveGuide",
    "Stored",
    "TeacherGuide",
    "add_rehearsal",
    "credit_sequences",
    "dynamic_sampling",
    "kl_in_reward",
    "kl_penalty",
    "use_advantages",
    "use_token_advantages",
    "with_methods",
]
