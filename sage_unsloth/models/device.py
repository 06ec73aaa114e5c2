"""Whether there is a GPU, and giving its memory back."""

import functools
import traceback
from collections.abc import Callable

from sage_unsloth.runs.stopping import Terminated


def frees_models(function: Callable) -> Callable:
    """Decorates what loads models: an interrupt leaves none behind, though a notebook keeps the
    traceback and with it every frame's variables.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, Terminated) as error:
            link: BaseException | None = error
            while link is not None:
                traceback.clear_frames(link.__traceback__)
                link = link.__context__
            release_memory()
            raise

    return call


def release_memory() -> None:
    """Free the models that nothing refers to: they hold themselves in cycles, which only the
    collector breaks.
    """
    import gc

    gc.collect()
    if has_gpu():
        import torch

        torch.cuda.empty_cache()


def has_gpu() -> bool:
    """Whether training and sampling run on a CUDA device."""
    import torch

    return torch.cuda.is_available()
