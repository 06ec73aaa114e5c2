from .bad_batch import reproduce as reproduce
from .finite import finite_only as finite_only
from .guided import guided_kl as guided_kl
from .loading import load_unsloth as load_unsloth
from .one_pass import one_pass_loss as one_pass_loss
from .trainer_names import ContractError as ContractError

__all__ = [
    "ContractError",
    "finite_only",
    "guided_kl",
    "load_unsloth",
    "one_pass_loss",
    "reproduce",
]
