"""A trainer of Unsloth or TRL without a guide: loading, private names, listeners, guards."""

import lazy_loader

# The names are listed in __init__.pyi; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
