"""What someone solves who never looks at the problem: from which k on pass@k says nothing.

With one of twelve workings right, k blind attempts solve 1 − (1 − 1/12)^k of the problems: .50 at
k = 8 and .94 at k = 32. A model that answers more widely is then "better" at k = 32 without being
able to do more. No verdict is given at such a k.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LARGEST_SHARE = 0.8
"""Of the start model's pass@k: from there on guessing explains too much of it for a verdict."""


def guess_bounds(chances_P: np.ndarray, ks: Sequence[int]) -> dict[int, np.ndarray]:
    """k -> (P,) the chance that k blind attempts include a correct one, 1 − (1 − p)^k."""
    return {k: 1 - (1 - chances_P) ** k for k in ks}


def says_something(bound: float, start: float) -> bool:
    """Whether a verdict at this k is about more than guessing.

    Args:
        bound: mean pass@k of blind attempts.
        start: the start model's mean pass@k.
    """
    return bound < LARGEST_SHARE * start


def main_k(rows: Mapping[str, Mapping[str, Any]]) -> int:
    """The largest k that `says_something`; of none the smallest k."""
    usable = [int(k) for k, row in rows.items() if row["usable"]]
    return max(usable, default=min(map(int, rows)))
