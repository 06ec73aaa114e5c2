"""What `doctor --deep` runs on the user's own card: the loss against a float64 oracle, and more."""

import lazy_loader

# The names are listed in __init__.pyi; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
