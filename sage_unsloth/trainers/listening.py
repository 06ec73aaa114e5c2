"""Wraps a trainer's methods in one place, with a fixed order of listeners.

A method is wrapped once, however many contexts listen to it. A call goes through its listeners, one
inside the other, in the order of `ORDER` from left to right, and then to the trainer's own method.
So the order in which contexts were opened does not matter.

A listener is called as `listener(proceed, *args, **kwargs)`, where `proceed` calls the next one,
and returns the result of the method.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.trainer_names import ContractError

Listener = Callable[..., Any]

ORDER: dict[str, tuple[str, ...]] = {
    # A rollout batch: drawn, graded, scored by the reference.
    names.ROLLOUT: ("resampling", "advantages", "signals", "weights"),
    names.GENERATE: ("resampling",),
    names.REWARDS: ("advantages", "resampling", "finite"),
    names.SCORE: ("signals", "loss"),
    # A micro-batch: Unsloth's loss is in the first of these, TRL's in the second.
    names.COMPUTE_LOSS: ("kl_in", "signals", "finite", "loss", "one_pass", "kl_penalty"),
    names.TRL_LOSS: ("loss", "kl_penalty"),
    # A micro-batch with its backward pass.
    names.STEP: ("methods", "finite", "rehearsal"),
    # The rows of the run.
    names.SAMPLER: ("order",),
}
"""The listeners of each method, the outermost first."""
SHAPES = ("shape", "token_advantages", "credit")
"""Order of the functions that change advantages (`choice.Choice.shapes`)."""
WRAPPED = "_sage_unsloth_wrapped"
"""Our attribute of the trainer: its wrapped methods, by name."""


class _Method:
    def __init__(self, trainer: Any, name: str) -> None:
        self.own = getattr(trainer, name)
        self.order = ORDER[name]
        self.listeners: dict[str, Listener] = {}

    def inside(self, role: str | None) -> Callable[..., Any]:
        """The next function for the listener of a role; None is a call from outside."""
        first = 0 if role is None else self.order.index(role) + 1
        proceed = self.own
        for name in reversed(self.order[first:]):
            if name in self.listeners:
                proceed = functools.partial(self.listeners[name], proceed)
        return proceed


@contextmanager
def listen(trainer: Any, role: str, **listeners: Listener) -> Iterator[None]:
    """Within this context, the listeners are called around the trainer's methods of their names.

    Args:
        role: of `ORDER`, which decides the place.
        listeners: by the name of a method in `ORDER`.

    Raises:
        ContractError: another one listens in this role.
    """
    with ExitStack() as stack:
        for name, listener in listeners.items():
            stack.enter_context(_listening(trainer, role, name, listener))
        yield


@contextmanager
def _listening(trainer: Any, role: str, name: str, listener: Listener) -> Iterator[None]:
    wrapped: dict[str, _Method] = vars(trainer).setdefault(WRAPPED, {})
    before = vars(trainer).get(name)
    first = name not in wrapped
    method = wrapped.setdefault(name, _Method(trainer, name)) if first else wrapped[name]
    if role in method.listeners:
        raise ContractError(
            f"what listens to {name} as {role!r} must not be opened twice on a trainer",
            actual="another one that is open",
            expected="one at a time",
        )
    method.listeners[role] = listener
    if first:
        setattr(trainer, name, lambda *args, **kwargs: method.inside(None)(*args, **kwargs))
    try:
        yield
    finally:
        del method.listeners[role]
        if first:
            del wrapped[name]
            if before is not None:
                setattr(trainer, name, before)
            elif name in vars(trainer):
                delattr(trainer, name)
            if not wrapped:
                delattr(trainer, WRAPPED)


def inside(trainer: Any, name: str, role: str) -> Callable[..., Any]:
    """The method as the listener of that role would call it."""
    wrapped: dict[str, _Method] = vars(trainer)[WRAPPED]
    return wrapped[name].inside(role)
