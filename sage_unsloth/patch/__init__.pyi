from .guided import guided_kl as guided_kl
from .one_pass import one_pass_loss as one_pass_loss

__all__ = ["guided_kl", "one_pass_loss"]
