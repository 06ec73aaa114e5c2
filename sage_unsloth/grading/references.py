"""A function of one's own, as the command line names it: `module:function`."""

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class OwnFunction:
    """A function that a user wrote.

    Attributes:
        function: itself.
        reference: "module:function".
        digest: of the source of its module; of the function alone where that is no file, as in a
            notebook.
    """

    function: Callable[..., Any]
    reference: str
    digest: str


def find_function(reference: str, what: str) -> OwnFunction:
    """Imports a function, also from a file in the working directory.

    Args:
        reference: "module:function".
        what: it is to be, for the message: "a reward".

    Raises:
        ValueError: another form, a module that cannot be imported, or no such function in it.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not name.isidentifier() or not module_name.strip("."):
        raise ValueError(
            f"{what} of your own is named module:function, as in my_rewards:brevity; got "
            f"{reference!r}"
        )
    if module_name.endswith(".py"):
        raise ValueError(
            f"{what} of your own is named by its module, without .py; got {reference!r}; write "
            f"{module_name.removesuffix('.py').replace('/', '.')}:{name}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the console script does not
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module itself raises
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        file = f"{module_name.replace('.', '/')}.py"
        raise ValueError(
            f"{what} of your own must be importable; {module_name} "
            + ("is not there" if missing else f"raised {type(error).__name__}: {error!s:.300}")
            + (f"; put {file} in {os.getcwd()}" if missing else f"; mend {file}")
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"{what} must be a function of {module_name}; got {name!r}, which is "
            f"{'no function' if hasattr(module, name) else 'not there'}; it has "
            f"{', '.join(there) or 'no function'}"
        )
    return OwnFunction(function, reference, source_digest(function))


def describe_function(function: Callable[..., Any]) -> OwnFunction:
    """A function that was passed in Python."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return OwnFunction(function, f"{function.__module__}:{name}", source_digest(function))


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256, 16 digits: of the module's file; of the function's source, or bytecode, where the
    module is a script, a notebook or no file.
    """
    own: Any = inspect.unwrap(function)
    file = getattr(sys.modules.get(own.__module__), "__file__", None)
    if file is not None and own.__module__ != "__main__" and Path(file).is_file():
        content = Path(file).read_bytes()
    else:
        try:
            content = inspect.getsource(own if inspect.isroutine(own) else type(own)).encode()
        except (OSError, TypeError):
            written = [own] if inspect.isroutine(own) else vars(type(own)).values()
            parts = [_code_bytes(part.__code__) for part in written if inspect.isfunction(part)]
            content = b"".join(parts)
    return hashlib.sha256(content).hexdigest()[:16]


def _code_bytes(code: CodeType) -> bytes:
    """What compiled code does, without the addresses that its printed form has."""
    parts = [code.co_code, repr(code.co_names).encode()]
    for value in code.co_consts:
        parts.append(_code_bytes(value) if isinstance(value, CodeType) else repr(value).encode())
    return b"\0".join(parts)
