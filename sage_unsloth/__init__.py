"""SAGE inside Unsloth's fast GRPO loss: a KL anchor q·π_ref that a guide q shapes (arXiv
2605.18864).

    from sage_unsloth import BranchGuide, guided_kl, load_unsloth

    load_unsloth()                      # before trl, transformers and peft
    trainer = GRPOTrainer(...)          # trl's name, Unsloth's generated class
    with guided_kl(trainer, BranchGuide()):
        trainer.train()

Importing the package loads neither torch nor Unsloth; each name is fetched when it is first used.
"""

import importlib
from typing import Any

_MODULES = {
    "contract": ("ContractError",),
    "guides": (
        "BranchGuide",
        "CosineSchedule",
        "Guide",
        "RandomGuide",
        "TokenGuide",
        "TokenSignals",
    ),
    "losses": ("grpo_loss", "k3"),
    "metrics": ("pass_at_k",),
    "patch": ("guided_kl", "load_unsloth"),
    "rewards": ("Grade", "Grader", "SolutionReward", "extract_answer", "grade"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
