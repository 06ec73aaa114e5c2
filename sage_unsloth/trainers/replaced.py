"""Replaces attributes of a trainer or module, and restores them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sage_unsloth.trainers.trainer_names import ContractError


@contextmanager
def replace_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context, the named attributes of `owner` have these values.

    A method of a trainer is replaced on the instance, so other trainers are not affected;
    afterwards the instance has no such attribute again. Contexts may overlap as long as they close
    in reverse order.

    Args:
        attributes: new values by name; `owner` need not have the name.
    """
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


@contextmanager
def with_callback(trainer: Any, callback: Any) -> Iterator[None]:
    """Within this context, the trainer has this transformers `TrainerCallback`."""
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)


_OPEN = threading.Lock()


@contextmanager
def one_guided_kl() -> Iterator[None]:
    """One `guided_kl` at a time in this process, in any thread; ContractError otherwise."""
    if not _OPEN.acquire(blocking=False):
        raise ContractError(
            "guided_kl must not be nested, because each replaces the same functions",
            actual="another guided_kl that is open",
            expected="one at a time",
        )
    try:
        yield
    finally:
        _OPEN.release()
