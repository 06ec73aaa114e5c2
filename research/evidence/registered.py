"""Which claims were written down before their runs, and what is left of them after Holm.

The claims are those of `data/results/frontier/design.md`: (a) at most `MATTERS` less pass@1 than
GRPO at β .05, (b) at most that much less pass@k than the SFT model, (c) more pass@k than GRPO,
(d) above GRPO's line. Each of several may come out by chance; Holm's correction (1979) bounds the
chance that any of them does.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sage_unsloth.study.crossed import CrossedEstimate
from sage_unsloth.study.verdicts import ALPHA, MATTERS, holm, p_value

THRESHOLDS = {"a": -MATTERS, "b": -MATTERS, "c": 0.0, "d": 0.0}
"""What the difference of a claim must exceed."""
_FULL = "abcd"
REGISTERED: dict[tuple[str, str], dict[str, str]] = {
    ("arithmetic-fresh", "fresh"): {
        "grpo beta=0.2": "abc",
        "grpo-reverse-kl beta=0.4": "abc",
        "sage-branch beta=0.2": "abc",
        "maxrl beta=0.05": "abc",
        "maxrl rehearsal_coef=0.3": _FULL,
        "dph-rl rehearsal_coef=1": _FULL,
    },
    ("countdown-fresh", "fresh"): {
        "grpo beta=0.2": "abc",
        "sage-branch beta=0.2": _FULL,
        "maxrl beta=0.05": _FULL,
        "maxrl rehearsal_coef=0.3": _FULL,
        "dph-rl rehearsal_coef=0.3": _FULL,
    },
}
"""(task, problems) -> point -> its claims. (d) joined for the second verdict on arithmetic."""


def judge_registered(
    claims: Mapping[str, str], estimate: Callable[[str, str], CrossedEstimate | None]
) -> list[dict[str, Any]]:
    """A row for each registered claim: its difference, p, p after Holm, whether it holds.

    A claim without a difference (a place beside the line that is not interpolated, a k that
    guessing reaches) is one of those that are corrected for, with p = 1.

    Args:
        claims: point -> letters of `THRESHOLDS`.
        estimate: from a point and a letter to the difference, or None.
    """
    rows: list[dict[str, Any]] = []
    for point, letters in claims.items():
        for letter in letters:
            row: dict[str, Any] = {"point": point, "claim": letter}
            if result := estimate(point, letter):
                row |= {"mean": result.mean, "low": result.low, "high": result.high}
            p = p_value(result, THRESHOLDS[letter]) if result else 1.0
            rows.append(row | {"p": p})
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row |= {"p_holm": adjusted, "holds": adjusted < ALPHA}
    return rows
