from .bad_batch import reproduce as reproduce
from .finite import finite_only as finite_only
from .guided import guided_kl as guided_kl
from .loading import load_unsloth as load_unsloth
from .one_pass import one_pass_loss as one_pass_loss
from .rehearsal import Stored as Stored
from .rehearsal import rehearsed as rehearsed
from .resampling import dynamic_sampling as dynamic_sampling
from .unsloth_names import ContractError as ContractError

__all__ = [
    "ContractError",
    "Stored",
    "dynamic_sampling",
    "finite_only",
    "guided_kl",
    "load_unsloth",
    "one_pass_loss",
    "rehearsed",
    "reproduce",
]
