"""What a checkpoint records of its training, and the comparison on resuming."""

import functools
import hashlib
import inspect
import logging
import types
from collections.abc import Collection
from typing import Any

from sage_unsloth.objective.describe import describe
from sage_unsloth.objective.protocols import SteeredGuide
from sage_unsloth.patch.choice import Choice
from sage_unsloth.trainers.rollout_weights import digest

NOT_RECORDED = "the trainer's own"
"""Shown for a setting that is not recorded."""

logger = logging.getLogger(__name__)


def resume_record(
    trainer: Any, choice: Choice, *, seam: str, own_adapters: Collection[str]
) -> dict[str, Any]:
    """The settings that must be equal to resume a checkpoint, by name.

    Args:
        seam: "unsloth" or "trl".
        own_adapters: the trainer's own, by which it scores the reference.
    """
    record = {
        "trainer": seam,
        "guide": describe(choice.guide),
        "beta": trainer.beta,
        "teacher": describe_teacher(trainer, choice.teacher),
        "shape": describe_function(choice.shape),
    }
    # Only open methods add a key, so a checkpoint from before a method existed compares equal.
    record |= {method.name: method.record for method in choice.methods}
    return record | {f"adapter {name}": describe_teacher(trainer, name) for name in own_adapters}


def describe_teacher(trainer: Any, teacher: Any) -> str:
    """The teacher's name and a digest of its weights, which differ after quantisation."""
    if teacher is None:
        return "None"
    if isinstance(teacher, str):
        name, whole, part = f"the adapter {teacher}", trainer.model, f".{teacher}."
    else:
        name, whole, part = type(teacher).__name__, teacher, ""
    weights = {n: p for n, p in whole.named_parameters() if part in n}
    return f"{name} {_short(repr(sorted(digest(weights).items())))}"


def describe_function(function: Any) -> str:
    """A function's name, code and settings; `describe` for other objects.

    Settings are defaults and the contents of a closure, a `functools.partial` or a method's object,
    as far as `describe` shows them. The code is that of this Python version.
    """
    if isinstance(function, functools.partial):
        settings = describe(types.SimpleNamespace(positional=function.args, **function.keywords))
        return f"{describe_function(function.func)} with {settings}"
    if inspect.ismethod(function):
        return f"{describe_function(function.__func__)} of {describe(function.__self__)}"
    if not isinstance(function, types.FunctionType):
        return getattr(function, "__qualname__", None) or describe(function)
    settings = {
        "defaults": function.__defaults__,
        **(function.__kwdefaults__ or {}),
        **inspect.getclosurevars(function).nonlocals,
    }
    body = _short(_code_text(function.__code__))
    return f"{function.__qualname__} {body} with {describe(types.SimpleNamespace(**settings))}"


def _code_text(code: types.CodeType) -> str:
    """Text of the code, equal in any process: sets among its constants are sorted."""
    constants = [
        _code_text(value)
        if isinstance(value, types.CodeType)
        else sorted(map(repr, value))
        if isinstance(value, frozenset)
        else value
        for value in code.co_consts
    ]
    # Not co_filename or line numbers: a function that only moved is the same.
    return repr((code.co_code, code.co_names, constants))


def check_resumed(
    step: int, selected: dict | None, now: dict[str, Any], steered: SteeredGuide | None
) -> None:
    """Compares a checkpoint's record with the current settings.

    A checkpoint that was written without `guided_kl` has no record. A key on one side only stands
    for the trainer's own on the other.

    Args:
        selected: what it holds under `watch.STATE`.
        now: the current `resume_record`.
        steered: the current guide, if it has a state.

    Raises:
        ValueError: something differs, or the state of the guide is missing.
    """
    if steered is not None and not (selected or {}).get("attributes"):
        raise ValueError(
            f"the checkpoint of step {step} must hold the state of its guide, but holds none for "
            f"{steered!r}. Resume with the guide that it was trained with, or start a new run"
        )
    before = (selected or {}).get("args") or {}
    if not before:
        logger.warning(
            "the checkpoint of step %s does not record its settings, so resuming with %s is "
            "unchecked",
            step,
            now["guide"],
        )
    changed = [
        f"{name} was {before.get(name, NOT_RECORDED)} and is {now.get(name, NOT_RECORDED)}"
        for name in (before | now if before else ())
        if before.get(name, NOT_RECORDED) != now.get(name, NOT_RECORDED)
    ]
    if changed:
        raise ValueError(
            f"a checkpoint must be resumed with its own settings, but those of step {step} were "
            f"others: {', '.join(changed)}. Change these back, or pass guided_kl(..., "
            "resume_with_changes=True)"
        )


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
