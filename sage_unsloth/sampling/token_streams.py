"""A random stream for each completion, and sampling a token with its next number.

Shapes: B completions, T tokens at most, V vocabulary.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """The seed of one completion: 52 bits of the SHA-256 of `[seed, problem_id, sample]` as JSON.

    It depends on nothing else, so any completion can be sampled again alone, and two models use the
    same stream for a problem. Any JSON reader keeps 52 bits; among a million completions, two share
    a seed with a chance of 1e-4.
    """
    text = json.dumps([seed, problem_id, sample])
    return int(hashlib.sha256(text.encode()).hexdigest()[:13], 16)


def row_uniforms(seeds: Sequence[int], length: int) -> "np.ndarray":
    """(B, T) numbers in [0, 1), float64: row i is the stream that seed i starts."""
    import numpy as np

    return np.stack([np.random.Generator(np.random.Philox(seed)).random(length) for seed in seeds])


def invert(probabilities_BV: Any, uniforms_B: Any) -> Any:
    """The first token, (B,) ids, at which the cumulative probability exceeds u.

    Args:
        probabilities_BV: (B, V); a token of probability 0 is never chosen.
        uniforms_B: (B,) u in [0, 1), float64.
    """
    import torch

    cumulative_BV = probabilities_BV.double().cumsum(-1)
    # u <= 1 - 2**-53, so in float64 u times the total is below the total.
    target_B = uniforms_B * cumulative_BV[:, -1]
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]
