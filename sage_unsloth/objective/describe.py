"""A guide, or a function's settings, as text for checkpoints and logs."""

from dataclasses import fields, is_dataclass
from typing import Any

from sage_unsloth.objective.protocols import Guide


def describe(guide: Any) -> str:
    """A guide's class and settings, equal for equal guides in any process.

    Settings are the printed fields of a dataclass, or the attributes of another object, if they are
    numbers, texts, guides, or tuples and sets of these. What a guide collects while it runs (lists,
    dicts, tensors) is not a setting, nor are attributes of its class.
    """
    if guide is None:
        return "None"
    if is_dataclass(guide):
        values = {field.name: getattr(guide, field.name) for field in fields(guide) if field.repr}
    else:
        values = dict(sorted(getattr(guide, "__dict__", {}).items()))
    texts = {name: _setting(value) for name, value in values.items()}
    shown = ", ".join(f"{name}={text}" for name, text in texts.items() if text is not None)
    return f"{type(guide).__qualname__}({shown})"


def _setting(value: object) -> str | None:
    """The text of a setting; None for other values."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if isinstance(value, Guide) or (is_dataclass(value) and not isinstance(value, type)):
        return describe(value)  # a schedule has settings as a guide has
    if isinstance(value, tuple | set | frozenset):
        texts = [_setting(entry) for entry in value]
        if None not in texts:
            # Python's own order of a set changes from one process to the next.
            return str(texts if isinstance(value, tuple) else sorted(map(str, texts)))
    return None
