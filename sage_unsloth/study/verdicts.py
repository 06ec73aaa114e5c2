"""What the interval of a difference says of a claim."""

MATTERS = 0.03
"""Smaller differences of pass@k count as none: about the largest gain in SAGE's tables."""


def verdict(kind: str, low: float, high: float, matters: float = MATTERS) -> str:
    """What an interval of a − b says of a claim.

    gain      supported: low > 0.             not supported: high < matters, no gain that matters.
    loss      supported: high < 0.            not supported: low > −matters.
    no loss   supported: low > −matters.      not supported: high < 0.
    """
    if kind == "loss":
        return verdict("gain", -high, -low, matters)
    if kind == "no loss":
        return "supported" if low > -matters else "not supported" if high < 0 else "undecided"
    if low > 0:
        return "supported"
    return "not supported" if high < matters else "undecided"
