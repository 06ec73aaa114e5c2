"""The paper's claims as differences of two algorithms, and the verdict of an interval on each.

Shapes: S seeds, P problems.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from research.benchmark.records import SFT, Records
from sage_unsloth.study.crossed import crossed_interval
from sage_unsloth.study.verdicts import verdict


@dataclass(frozen=True)
class Claim:
    """Something that the paper says, or that its method is for, as a difference of two algorithms.

    Attributes:
        text: the claim.
        paper: the paper's own numbers for it, or what it rests on.
        a, b: the difference is a − b.
        quantity: "pass@1", "pass@n" or "pass@16" on the set; "rare way" or "solutions by the rare
            way"; "reward" of the last third of training.
        set: which problems, "test", or "ood" for all sets out of distribution together.
        kind: "gain": a is better; "no loss": a is not worse by `MATTERS`; "loss": a is worse.
    """

    text: str
    paper: str
    a: str
    b: str
    quantity: str = "pass@n"
    set: str = "test"
    kind: str = "gain"


RARE = "solutions by the rare way"
EXACT = "Eq. 4; not in the paper's code"
CLAIMS = (
    Claim("RL raises pass@1 over SFT", ".227 → .266", "grpo", SFT, "pass@1"),
    Claim("RL by GRPO narrows what the SFT model could solve", "what SAGE is for",
          "grpo", SFT, kind="loss"),
    Claim("Branch raises pass@1 over GRPO", ".266 → .284", "sage-branch", "grpo", "pass@1"),
    Claim("Branch raises pass@16 over GRPO", "curves", "sage-branch", "grpo", "pass@16"),
    Claim("Branch raises pass@n over GRPO", ".714 → .729", "sage-branch", "grpo"),
    Claim("Branch solves no less than SFT at n samples", ".708 → .729",
          "sage-branch", SFT, kind="no loss"),
    Claim("Token raises pass@n over GRPO", ".714 → .718", "sage-token", "grpo"),
    Claim("Random raises pass@n over GRPO", ".714 → .722", "sage-random", "grpo"),
    Claim("Forward KL raises pass@n over GRPO", ".714 → .727", "grpo-forward-kl", "grpo"),
    Claim("The KL term raises pass@n", ".701 → .714", "grpo", "grpo-no-kl"),
    Claim("Without KL the training reward is higher", "Fig. 2", "grpo-no-kl", "grpo", "reward"),
    Claim("Branch raises pass@n of BNPO without KL", ".699 → .715",
          "bnpo-sage-branch", "bnpo-no-kl"),
    Claim("Branch raises pass@n of DAPO without KL", ".696 → .712",
          "dapo-sage-branch", "dapo-no-kl"),
    Claim("Branch keeps the rare way alive better than GRPO", "App. G",
          "sage-branch", "grpo", RARE),
    Claim("Branch helps out of distribution", "Knights and Knaves",
          "sage-branch", "grpo", set="ood"),
    Claim("With the exact credit Branch raises pass@n", EXACT, "sage-branch-exact", "grpo-exact"),
    Claim("With the exact credit Branch keeps the rare way alive", EXACT,
          "sage-branch-exact", "grpo-exact", RARE),
)  # fmt: skip


def judge(claim: Claim, records: Records) -> dict[str, Any] | None:
    """The claim with its difference, interval and verdict; None where it was not measured."""
    if not {claim.a, claim.b} <= set(records.algorithms):
        return None
    first, second = (_quantity(records, name, claim) for name in (claim.a, claim.b))
    if first is None or second is None:
        return None
    difference = first - second
    if difference.size < 2:
        return None
    result = crossed_interval(difference)
    # One seed shows how these two models differ, and nothing about their algorithms.
    said = verdict(claim.kind, result.low, result.high) if len(records.seeds) > 1 else "undecided"
    means = {"value_a": float(first.mean()), "value_b": float(second.mean())}
    return asdict(claim) | asdict(result) | means | {"verdict": said}


def _quantity(records: Records, algorithm: str, claim: Claim) -> np.ndarray | None:
    if claim.quantity == "reward":
        return records.third(algorithm, "reward", 2)
    if claim.quantity in ("rare way", RARE):
        if records.data["rare_route"] is None:
            return None
        share = (
            records.route_share if claim.quantity == "rare way" else records.solutions_by_rare_way
        )
        return share(algorithm)
    names = [name for name in records.data["sets"] if (name == "test") == (claim.set == "test")]
    tables = []
    for name in names:
        n = records.data["sets"][name]["num_samples"]
        k = n if claim.quantity == "pass@n" else int(claim.quantity.removeprefix("pass@"))
        if k > n:
            return None
        tables.append(records.pass_at_k(records.of(algorithm), name, k))
    return np.concatenate(tables, axis=1) if tables else None
