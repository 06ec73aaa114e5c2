"""The paper's claims as differences of two algorithms, and the verdict of an interval on each.

Shapes: S seeds, P problems.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sage_unsloth.study.crossed import crossed_interval
from sage_unsloth.study.points import START
from sage_unsloth.study.records import Tables
from sage_unsloth.study.verdicts import verdict


@dataclass(frozen=True)
class Claim:
    """Something that the paper says, or that its method is for, as a difference of two algorithms.

    Attributes:
        text: the claim.
        paper: the paper's own numbers for it, or what it rests on.
        a, b: the difference is a − b.
        quantity: "pass@1", "pass@n" or "pass@16" on the set; "solutions by the rare way";
            "reward" of the last third of training.
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
    Claim("RL raises pass@1 over SFT", ".227 → .266", "grpo", START, "pass@1"),
    Claim("RL by GRPO narrows what the SFT model could solve", "what SAGE is for",
          "grpo", START, kind="loss"),
    Claim("Branch raises pass@1 over GRPO", ".266 → .284", "sage-branch", "grpo", "pass@1"),
    Claim("Branch raises pass@16 over GRPO", "curves", "sage-branch", "grpo", "pass@16"),
    Claim("Branch raises pass@n over GRPO", ".714 → .729", "sage-branch", "grpo"),
    Claim("Branch solves no less than SFT at n samples", ".708 → .729",
          "sage-branch", START, kind="no loss"),
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


def judge_claims(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each claim that was measured with its difference, interval and verdict."""
    rows = []
    for claim in CLAIMS:
        first, second = (_quantity(study, name, claim) for name in (claim.a, claim.b))
        if first is None or second is None:
            continue
        result = crossed_interval(first - second)
        # One seed shows how these two models differ, and nothing about their algorithms.
        said = verdict(claim.kind, result.low, result.high) if len(first) > 1 else "undecided"
        means = {"value_a": float(first.mean()), "value_b": float(second.mean())}
        rows.append(asdict(claim) | asdict(result) | means | {"verdict": said})
    return rows


def _quantity(study: Mapping[str, Any], point: str, claim: Claim) -> np.ndarray | None:
    """(S, P) of a point, or None where it was not measured."""
    tables = {name: Tables(study, name) for name in study["sets"]}
    main = next(iter(tables.values()))
    if point not in (START, *main.points):
        return None
    runs = [study["start"]] * len(main.seeds) if point == START else main.runs_at(point)
    if claim.quantity == "reward":
        rewards = np.array([run["training"]["reward"] for run in runs])
        return np.array_split(rewards, 3, axis=1)[2].mean(axis=1, keepdims=True)
    if claim.quantity == RARE:  # Eq. 13: of a problem's correct completions, 0 where it has none
        correct, rare = (
            np.array([run["sets"][main.name][name] for run in runs], float)
            for name in ("correct", "rare_correct")
        )
        return rare / np.maximum(correct, 1)
    values = []
    for name, table in tables.items():
        if (name == main.name) == (claim.set == "test"):
            n = table.correct(point)[0]
            k = n if claim.quantity == "pass@n" else int(claim.quantity.removeprefix("pass@"))
            if k > n:
                return None
            values.append(table.by_problem(point, k))
    return np.concatenate(values, axis=1) if values else None
