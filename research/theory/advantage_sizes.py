"""How large the advantages of each rule are beside GRPO's, and how hard each pushes a problem, by
enumeration of all groups.
"""

import itertools

import torch

from sage_unsloth.methods.advantage_rules import GRPO, RULES, advantage_rule

PROBABILITIES = (0.1, 0.25, 0.5, 0.75)


def root_mean_square(rule: str, probability: float, num_generations: int) -> float:
    """√E[A²] over all groups of answers that are right with this probability.

    Where the gradients of ∇log π of different completions are of one size and at right angles, the
    norm of an update is proportional to it. A rule that ranks completions by their likelihood gets
    ranks that do not depend on the rewards.

    Args:
        rule: as `advantage_rule` takes it; at its first step, where it changes with time.
        probability: of a right answer.
        num_generations: G.
    """
    groups = torch.tensor(
        [*itertools.product([0.0, 1.0], repeat=num_generations)], dtype=torch.float64
    )
    right = groups.sum(1)
    weights = probability**right * (1 - probability) ** (num_generations - right)
    ranks = torch.arange(num_generations, dtype=torch.float64).expand(groups.shape)
    result = advantage_rule(rule)(groups, mean_logps=-ranks, step=0, max_steps=1)
    return (weights * result.square().mean(1)).sum().sqrt().item()


def push_on_log_rate(rule: str, probability: float, num_generations: int) -> float:
    """The weight on ∇log p in a rule's expected gradient from one problem with solve rate p.

    E[Σ_i A_i ∇log π(y_i)] / G = w ∇log p, since ∇log π has the mean ∇p/p over right answers and
    −∇p/(1 − p) over wrong ones. In large groups w is √(p/(1 − p)) for "grpo" and 1 for "maxrl". So
    it says how hard rows of different difficulty pull on what they share.

    Args:
        rule: whose advantages depend on the rewards alone.
        probability: p, in (0, 1).
        num_generations: G.
    """
    right = torch.arange(num_generations + 1)
    groups = (torch.arange(num_generations) < right[:, None]).double()  # one for each count
    weights = torch.distributions.Binomial(num_generations, torch.tensor(probability).double())
    logps = torch.zeros_like(groups)
    advantages = advantage_rule(rule)(groups, mean_logps=logps, step=0, max_steps=1)
    score = torch.where(groups > 0, 1.0, -probability / (1 - probability))
    return (weights.log_prob(right.double()).exp() * (advantages * score).mean(1)).sum().item()


def table(num_generations: int = 8) -> list[dict[str, str]]:
    """For each rule the groups that teach nothing, and the size of its advantages over GRPO's."""
    rows = []
    for name in RULES:
        silent = advantage_rule(name).silent_counts(num_generations)
        row = {
            "advantages": f"`{name}`",
            "teaches nothing with c right": ", ".join(map(str, silent)) or "never",
        }
        for p in PROBABILITIES:
            sizes = [root_mean_square(rule, p, num_generations) for rule in (name, GRPO)]
            row[f"p = {p:g}"] = f"{sizes[0] / sizes[1]:.2f}"
        rows.append(row)
    return rows
