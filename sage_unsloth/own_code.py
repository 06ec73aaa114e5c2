"""Custom code: how `module:name` is found, what is recorded of it, and where it failed.

Rewards, verifiers, algorithms, guides and advantage rules are all named in this form.
"""

import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any


class OwnCodeError(RuntimeError):
    """Custom code raised, or returned an invalid value; the message names it."""


@dataclass(frozen=True)
class OwnFunction:
    """A custom function.

    Attributes:
        reference: "module:function".
        digest: of its module's source; of the function alone if that is not a file, as in a
            notebook.
    """

    function: Callable[..., Any]
    reference: str
    digest: str


def named_object(reference: str, what: str) -> Any:
    """The object `name` of `module`, which may be in the current folder.

    The current folder comes first, as with `python -m`; the console script and torchrun omit it.

    Args:
        reference: "module:name", such as `my_rules:halves` for `halves` of `my_rules.py`.
        what: its role, for the message: "a reward".

    Raises:
        ValueError: another form, a module that cannot be imported, or no such name in it.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not name.isidentifier() or not module_name.strip("."):
        raise ValueError(
            f"{what} of your own is named module:name, got {reference!r}. For `name` in "
            "my_module.py write my_module:name"
        )
    if module_name.endswith(".py"):
        raise ValueError(
            f"{what} of your own is named by its module, without .py, got {reference!r}. Write "
            f"{module_name.removesuffix('.py').replace('/', '.')}:{name}"
        )
    if not {os.getcwd(), ""} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module itself raises
        file = f"{module_name.replace('.', '/')}.py"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            given = f"is not there. Put {file} in {os.getcwd()}, or install its package"
        else:
            given = f"raised {describe_exception(error)}. Fix {file}"
        raise ValueError(
            f"{what} of your own must be importable, but {module_name} {given}"
        ) from error
    if not hasattr(module, name):
        there = [key for key in vars(module) if not key.startswith("_")]
        raise ValueError(
            f"{what} must be a name of {module_name} ({', '.join(there) or 'which has none'}), got "
            f"{name!r}"
        )
    return getattr(module, name)


def named_function(reference: str, what: str) -> OwnFunction:
    """`named_object` for a function.

    Raises:
        ValueError: see `named_object`; or it is not a function.
    """
    result = named_object(reference, what)
    if not callable(result):
        module = sys.modules[reference.partition(":")[0]]
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"{what} must be a function, got {reference}, which is {result!r:.100}. Its module has "
            f"{', '.join(there) or 'no function'}"
        )
    return OwnFunction(result, reference, source_digest(result))


def function_record(function: Callable[..., Any]) -> OwnFunction:
    """The record of a function that was passed in Python."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return OwnFunction(function, f"{function.__module__}:{name}", source_digest(function))


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256, 16 digits, of the module's file.

    For a script, a notebook or no file: of the function's source, or bytecode.
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


def describe_exception(error: BaseException) -> str:
    """An exception with the last line of custom code in its traceback:
    `KeyError: 'x' at my_rewards.py:12, in brevity`.
    """
    given = f"{type(error).__name__}: {error!s:.500}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        given = f"{type(error).__name__}: {error.msg}"
        return f"{given} at {_place(error.filename, error.lineno)}"
    return given + place_of(frames)


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """` at file:line, in function` of the last frame of custom code; "" without one."""
    own = own_frames(frames)
    if not own:
        return ""
    named = [frame.name for frame in own if not frame.name.startswith("<")]  # as a comprehension is
    inside = f", in {named[-1]}" if named else ""
    return f" at {_place(own[-1].filename, own[-1].lineno)}{inside}"


def own_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Frames outside Python, installed packages and this package."""
    paths = sysconfig.get_paths()
    libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries.add(str(Path(__file__).parent))
    return [
        frame
        for frame in frames
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in libraries)
    ]


def _place(filename: str, line: int | None) -> str:
    """The file, relative to the current folder if inside, and the line."""
    path = Path(filename)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def _code_bytes(code: CodeType) -> bytes:
    """The content of compiled code, without the addresses in its repr."""
    parts = [code.co_code, repr(code.co_names).encode()]
    for value in code.co_consts:
        parts.append(_code_bytes(value) if isinstance(value, CodeType) else repr(value).encode())
    return b"\0".join(parts)
