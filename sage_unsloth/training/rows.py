"""Rows of metrics: as a trainer logs them, and the held-out curve in them."""

from collections.abc import Mapping
from typing import Any


def numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer logs, with numbers in the place of those that it logs as text for display."""
    result = {}
    for key, value in logs.items():
        try:
            result[key] = float(value)
        except (TypeError, ValueError):
            result[key] = value
    return result
