"""Which trainer a process uses: Unsloth's generated one, or TRL's own.

Unsloth replaces `trl.GRPOTrainer` and parts of transformers on import, so a process has one backend
for its whole life. Everything that loads a model calls `backend()`.
"""

import importlib.util
import logging
import sys

from sage_unsloth.trainers.trainer_names import UNSLOTH_MISSING

UNSLOTH, TRL = "unsloth", "trl"
BACKENDS = (UNSLOTH, TRL)

NO_TRL = (
    "backend='trl' needs the package trl, which is not installed (pip install -r "
    "requirements-trl.txt)"
)

_chosen: list[str] = []

logger = logging.getLogger(__name__)


def backend() -> str:
    """The backend of this process: the chosen one, or else Unsloth if installed."""
    if _chosen:
        return _chosen[0]
    return UNSLOTH if is_installed(UNSLOTH) else TRL


def load_backend(expected: str | None = None, *, standby: bool = False) -> str:
    """Chooses the backend of this process, imports Unsloth if needed, and returns its name.

    Args:
        expected: one of `BACKENDS`; None is `backend()`.
        standby: see `load_unsloth`.

    Raises:
        ValueError: an unknown or missing backend, or another one than this process has already.
    """
    name = expected or backend()
    check_backend(name)
    if name == UNSLOTH:
        if UNSLOTH not in sys.modules:
            logger.info("Loading Unsloth.")
        from sage_unsloth.trainers.loading import load_unsloth  # which imports torch

        load_unsloth(standby=standby)
    _chosen[:] = [name]
    return name


def check_backend(expected: str) -> None:
    """Raises ValueError if this process cannot have that backend; imports nothing."""
    if expected not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {expected!r}")
    if not is_installed(expected):
        raise ValueError(UNSLOTH_MISSING if expected == UNSLOTH else NO_TRL)
    if expected == TRL and UNSLOTH in sys.modules:
        raise ValueError(
            "backend='trl' needs a process that never imported Unsloth, which replaces "
            "trl.GRPOTrainer. Start a new Python process (in a notebook, restart the kernel)"
        )
    if expected == UNSLOTH and TRL in _chosen:
        raise ValueError(
            "a process has one backend, because Unsloth replaces trl.GRPOTrainer, got "
            "backend='unsloth' after 'trl'. Start a new Python process (in a notebook, restart the "
            "kernel)"
        )


def is_installed(name: str) -> bool:
    """Whether a backend's package is installed; imports nothing."""
    return name in sys.modules or importlib.util.find_spec(name) is not None
