"""What a text `module:name` names in Python code of your own."""

import importlib
import os
import sys
from typing import Any


def named_object(text: str, setting: str) -> Any:
    """The object `name` of `module`, which is imported, also from the current folder.

    Args:
        text: `module:name`, such as `my_rules:halves` for `halves` of `my_rules.py`.
        setting: what it was given for, for the message.

    Raises:
        ValueError: not of that form, the module cannot be imported, or it has no such name.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ValueError(
            f"{setting} takes module:name for code of your own; got {text!r}; for `name` in "
            "my_module.py write my_module:name"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"{setting}={text!r} names a module that must be importable from here; got "
            f"{type(error).__name__}: {error!s:.200}; start in the folder that holds {module}.py, "
            "or install its package"
        ) from error
    if not hasattr(found, name):
        there = [key for key in vars(found) if not key.startswith("_")]
        raise ValueError(
            f"{setting}={text!r} names something that {module} must define; it defines "
            f"{', '.join(there) or 'nothing'}"
        )
    return getattr(found, name)
