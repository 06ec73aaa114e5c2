"""Passes Python values from a program's process to the comparing one, as JSON."""

import hashlib
from typing import Any

NESTING = 20  # a value nested deeper is not compared


def encode(value: Any, depth: int = 0) -> Any:
    """A value as JSON for `decode`; anything but a plain value becomes {"?": its class}."""
    kind = type(value)
    if depth > NESTING:
        return {"?": "deep"}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [encode(item, depth + 1) for item in value]}
    if kind.__name__ in ("dict", "defaultdict", "Counter", "OrderedDict"):
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    return {"?": str(kind.__name__)[:100]}


def decode(value: Any) -> Any:
    """The value that `encode` wrote; only for golds, because sets and dicts hash their items.

    Raises:
        ValueError, TypeError: `encode` does not write it, or an unknown class.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "complex":
        return complex(*map(float, content))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    plain = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in plain:
        raise ValueError(f"not a plain value: {content!r:.100}")
    return plain[kind](map(decode, content))


def output_lines(text: str) -> list[str]:
    """The compared lines of an output: without trailing white space and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def output_digest(text: str) -> str:
    """SHA-256 of `output_lines`: outputs are equal where these are."""
    return hashlib.sha256(
        "\n".join(output_lines(text)).encode("utf-8", "surrogatepass")
    ).hexdigest()
