"""One way to replace an attribute of a trainer or module, and to put it back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sage_unsloth.trainers.trainer_names import ContractError


@contextmanager
def replace_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context, the named attributes of `owner` are these; afterwards what they were.

    A method of a trainer is replaced on the instance, so other trainers keep theirs; afterwards
    the instance has no attribute of that name again, and its class's method is seen. Contexts may
    overlap as long as they close in reverse order.

    Args:
        owner: an instance or a module.
        attributes: new values by name; a name may be one that `owner` does not have.
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
    """Within this context, the trainer calls `callback`, a transformers `TrainerCallback`."""
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)


_OPEN = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """One `guided_kl` at a time in this process, in whatever thread.

    Raises:
        ContractError: another is open.
    """
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
