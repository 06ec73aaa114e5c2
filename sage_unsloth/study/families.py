"""Where the gain and the loss are: by family of problems, and by k within a family.

The mean over units is a weighted mean over families, so what RL gains and loses is a sum of their
parts. If the gain is one family's and the loss another's, the families compete; if it is one
family's at small and at large k, its own curves cross.

Shapes: S seeds, P problems.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def family_weights(families: Sequence[str], units: Sequence[str]) -> dict[str, float]:
    """Family -> its share of the units."""
    of_unit = dict(zip(units, families, strict=True))
    names = list(dict.fromkeys(families))
    return {name: list(of_unit.values()).count(name) / len(of_unit) for name in names}


def family_curves(
    values_KSP: Mapping[int, np.ndarray], families: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Family -> k -> mean pass@k; keys of k are text, as in JSON."""
    member = np.array(families)
    return {
        family: {
            str(k): float(values[:, member == family].mean()) for k, values in values_KSP.items()
        }
        for family in dict.fromkeys(families)
    }


def family_parts(
    start: Mapping[str, Mapping[str, float]],
    trained: Mapping[str, Mapping[str, float]],
    weights: Mapping[str, float],
) -> dict[str, Any]:
    """Family -> k -> what it adds to the change of the mean; `all` -> k -> their sum."""
    parts = {
        family: {k: weight * (trained[family][k] - start[family][k]) for k in trained[family]}
        for family, weight in weights.items()
    }
    first = next(iter(parts.values()))
    return parts | {"all": {k: sum(part[k] for part in parts.values()) for k in first}}
