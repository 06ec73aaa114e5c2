from .bad_batch import reproduce as reproduce
from .finite import finite_only as finite_only
from .loading import load_unsloth as load_unsloth
from .trainer_names import ContractError as ContractError

__all__ = ["ContractError", "finite_only", "load_unsloth", "reproduce"]
