"""Values returned by a program, as the comparing process holds them.

Python's sets and dicts hash numbers by public rules, so a thousand chosen numbers can cost a
million comparisons. Here members and keys are looked up by a text (`key_of`), equal for equal
values and hashed with a secret of the process.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from sage_unsloth.grading.program_values import NESTING

NUMBER_TYPES = (bool, int, float, complex)
LONGEST_KEY = 64  # characters; of a longer one its digest is taken
_WHOLE, _LARGEST_FLOAT = 2**64, int(sys.float_info.max)


class SetValue:
    """A set or frozenset; iterates in insertion order."""

    def __init__(self, items: Iterable[Any], kind: type = set) -> None:
        self.by_key = {key_of(item): item for item in items}
        self.kind = kind

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.by_key.values())

    def __contains__(self, item: Any) -> bool:
        return key_of(item) in self.by_key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SetValue) and self.by_key.keys() == other.by_key.keys()

    def __le__(self, other: "SetValue") -> bool:
        return self.by_key.keys() <= other.by_key.keys()

    def __lt__(self, other: "SetValue") -> bool:
        return self.by_key.keys() < other.by_key.keys()

    def __sub__(self, other: "SetValue") -> "SetValue":
        return SetValue(item for key, item in self.by_key.items() if key not in other.by_key)

    def __repr__(self) -> str:
        raise TypeError("the text of a set has no order")

    __hash__ = None  # type: ignore[assignment]


class DictValue:
    """A dict."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.by_key = {key_of(key): (key, value) for key, value in pairs}

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.by_key.values())

    def __contains__(self, key: Any) -> bool:
        return key_of(key) in self.by_key

    def __getitem__(self, key: Any) -> Any:
        return self.by_key[key_of(key)][1]

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self.by_key.values()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DictValue)
            and self.by_key.keys() == other.by_key.keys()
            and all(value == other.by_key[key][1] for key, (_, value) in self.by_key.items())
        )

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in self.items()) + "}"

    __hash__ = None  # type: ignore[assignment]


def key_of(value: Any) -> str:
    """A text that is equal exactly for equal hashable values (1, 1.0 and True are equal).

    Raises:
        TypeError: Python cannot hash such a value.
    """
    kind = type(value)
    if kind in (bool, int):
        text = _number_key(value)
    elif kind is float:
        text = f"nan{id(value)}" if math.isnan(value) else _number_key(value)  # equals itself alone
    elif kind is complex:
        parts = key_of(value.real), key_of(value.imag)
        text = parts[0] if value.imag == 0 else "c" + ",".join(parts)
    elif kind is str:
        text = f"s{value}"
    elif kind is bytes:
        text = f"b{value.hex()}"
    elif kind is tuple:
        text = "t" + _join(key_of(item) for item in value)
    elif kind is SetValue:
        text = "f" + _join(sorted(value.by_key))
    elif value is None:
        text = "None"
    else:
        raise TypeError(f"{kind.__name__} has no hash")
    if len(text) <= LONGEST_KEY:
        return text
    return "d" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _number_key(value: float) -> str:
    """Digits of a small whole number; else those of the equal float, if there is one."""
    if abs(value) < _WHOLE and value == int(value):
        return f"n{int(value):x}"
    if isinstance(value, float):
        return f"n{value.hex()}"
    is_float = abs(value) <= _LARGEST_FLOAT and int(float(value)) == value
    return f"n{float(value).hex()}" if is_float else f"n{value:x}"


def _join(keys: Iterable[str]) -> str:
    return "".join(f"{len(key)}:{key}" for key in keys)


def read_results(text: bytes, count: int) -> list[Any] | None:
    """The values that a program returned, one line of JSON each.

    None if one is not a plain value, or there are not `count`. Memory and time are bounded by the
    length of the text.
    """
    lines = text.splitlines()
    if len(lines) != count:
        return None
    try:
        return [_read(json.loads(line), 0) for line in lines]
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None


def _read(value: Any, depth: int) -> Any:
    if depth > NESTING + 1:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_read(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if not isinstance(content, list):
        raise ValueError("not a plain value")
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return DictValue((_read(key, depth + 1), _read(item, depth + 1)) for key, item in content)
    items = (_read(item, depth + 1) for item in content)
    if kind == "tuple":
        return tuple(items)
    if kind in ("set", "frozenset"):
        return SetValue(items)
    raise ValueError("not a plain value")
