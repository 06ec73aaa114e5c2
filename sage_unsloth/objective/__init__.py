"""What a token costs: guides, KL penalties, credit and the GRPO loss, in PyTorch alone."""

import lazy_loader

# The names are listed in __init__.pyi; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
