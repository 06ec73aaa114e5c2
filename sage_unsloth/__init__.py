"""SAGE inside the GRPO loss of Unsloth, or of TRL's own trainer: a KL anchor q·π_ref that a guide
q shapes (arXiv 2605.18864).

    from sage_unsloth import BranchGuide, guided_kl, load_unsloth

    load_unsloth()                      # before trl, transformers and peft
    trainer = GRPOTrainer(...)          # trl's name, Unsloth's generated class
    with guided_kl(trainer, BranchGuide()):
        trainer.train()

Importing the package loads neither torch nor Unsloth. The names, listed in __init__.pyi, and the
version are looked up when they are first used.
"""

from typing import Any

import lazy_loader

_public_name, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    return _public_name(name)


def __dir__() -> list[str]:
    return __all__.copy()
