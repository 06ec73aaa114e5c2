"""What costs nothing: some of the k attempts by the model that RL started from.

A LoRA adapter can be switched off, so both models are at hand. Of k attempts let m be the start
model's and the others the trained model's. The chance that one of them is correct follows from the
counts alone, with n samples of the trained model and n' of the start model:

    pass@(k, m) = 1 − C(n' − c', m)/C(n', m) · C(n − c, k − m)/C(n, k − m)

which is unbiased, because the two factors are, and are drawn independently. An attempt at random
is then correct with (m/k) pass@1' + (1 − m/k) pass@1; the first one, if the trained model makes
it, with pass@1. A method that does not lie above this line has bought nothing.

Shapes: S seeds, U units or problems.
"""

from collections.abc import Mapping

import numpy as np

from sage_unsloth.evaluation.metrics import pass_at_k


def mixture_pass_at_k(num_samples, num_correct, start_samples, start_correct, k: int, m: int):
    """pass@(k, m), for each problem.

    Args:
        num_samples, num_correct: n and c of the trained model, (…).
        start_samples, start_correct: n' and c' of the start model, (…).
        k: attempts in all.
        m: the start model's, 0 to k.

    Raises:
        ValueError: not 0 <= m <= k, or more attempts than samples.
    """
    if not 0 <= m <= k:
        raise ValueError(f"the start model's attempts must be 0 to k = {k}, got {m}")
    missed = np.ones(np.broadcast(num_correct, start_correct).shape)
    if m:
        missed = missed * (1 - np.asarray(pass_at_k(start_samples, start_correct, m)))
    if k > m:
        missed = missed * (1 - np.asarray(pass_at_k(num_samples, num_correct, k - m)))
    return 1 - missed


def bracketing_share(level: float, first: float, start_first: float, k: int) -> int | None:
    """The m for which a random attempt of the mixture m has pass@1 >= `level`, and of m + 1 not.

    None where `level` is not between the trained and the start model's pass@1.
    """
    if not start_first < level <= first:
        return None
    return min(k - 1, int((first - level) / (first - start_first) * k))


def random_attempt(values: Mapping[str, np.ndarray], m: int, k: int) -> np.ndarray:
    """(S, U) pass@1 of a random attempt; `values` has `start` and `trained`."""
    return m / k * values["start"] + (1 - m / k) * values["trained"]
