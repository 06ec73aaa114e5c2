"""From the records of a set to the matrix of correct samples, the input of every metric."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sage_unsloth.grading.checker import Grade


def correct_matrix(
    records: Sequence[dict],
    problems: Sequence[str] | None = None,
    num_samples: int | None = None,
    *,
    of: str = "",
) -> np.ndarray:
    """Which samples of which problem are correct, (P, N) bool.

    Args:
        records: with `problem_id`, `sample` and `grade`; in any order.
        problems: ids in row order; other records are ignored. None takes the order of the records.
        num_samples: N; None takes the largest number of a problem.
        of: owner of the records, for the message.

    Raises:
        ValueError: a problem does not have exactly the samples 0 to N - 1.
    """
    result: dict[str, dict[int, bool]] = defaultdict(dict)
    for record in records:
        result[record["problem_id"]][record["sample"]] = record["grade"] == Grade.CORRECT
    problems = list(result) if problems is None else problems
    if num_samples is None:
        num_samples = max((max(result[p]) + 1 for p in problems if result[p]), default=0)
    for problem in problems:
        samples = result[problem]
        if len(samples) != num_samples or not samples.keys() <= set(range(num_samples)):
            raise ValueError(
                f"every problem must have {num_samples} samples, but "
                f"{problem!r}{f' of {of}' if of else ''} has {len(samples)}. Run evaluate again, "
                "which samples the rest"
            )
    correct_PN = np.array(
        [[result[p][i] for i in range(num_samples)] for p in problems], dtype=bool
    )
    return correct_PN.reshape(len(problems), num_samples)
