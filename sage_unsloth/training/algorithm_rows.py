"""The algorithms as rows of settings: the paper's, missing comparisons, other advantage rules."""

from typing import Any

from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.training.algorithm import Algorithm

_EXACT: dict[str, Any] = {
    # r − mean(r) without a scale, and a constant instead of lengths: this leaves the gradient of
    # Eq. 6 up to that constant.
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "kl_estimator": "k3-is",
    "credit": "sequence",
}
PAPER = "the paper's"
GUIDES = "other guides"
KL = "other places and estimators of the KL"
EXACT = "the exact gradient"
PASS_AT_K = "pass@k: other advantages"
DIVERSITY = "against a collapse of entropy"
ALGORITHM_GROUPS = (PAPER, GUIDES, KL, EXACT, PASS_AT_K, DIVERSITY)
"""In the order of `train --list`."""
_DAPO = (
    "clip and normalisation of DAPO (not its dynamic sampling, overlong filtering or overlong "
    "shaping)"
)

_ROWS = (
    Algorithm(
        name="grpo",
        group=PAPER,
        paper_row="GRPO",
        description="k3 as a loss: in expectation the forward KL's gradient, though k3's value "
        "is the reverse KL's",
    ),
    Algorithm(
        name="grpo-no-kl",
        group=PAPER,
        settings={"beta": 0.0},
        paper_row="GRPO w/o KL",
        description="no KL term: against it, what the penalty does at all",
    ),
    Algorithm(
        name="grpo-forward-kl",
        group=PAPER,
        settings={"kl_estimator": "forward-kl"},
        paper_row="GRPO + forward KL, if this is what it was",
        description="importance-weighted cross-entropy −sg[ρ]·log π: the forward KL's "
        "gradient, so grpo's in expectation",
    ),
    Algorithm(
        name="grpo-forward-kl-naive",
        group=PAPER,
        settings={"kl_estimator": "forward-kl-naive"},
        paper_row="GRPO + forward KL, if this is what it was",
        description="ρ log ρ − (ρ − 1) differentiated, as a direct implementation has it: "
        "neither KL's gradient",
    ),
    Algorithm(
        name="grpo-reverse-kl",
        group=KL,
        settings={"kl_estimator": "k3-is"},
        description="k3 with the importance ratio inside: the reverse KL's gradient per token, "
        "with the states held fixed",
    ),
    Algorithm(
        name="sage-random",
        group=PAPER,
        paper_row="GRPO + Random",
        guide=RandomGuide(),
        description="q is noise of mean 1 whatever the token: grpo plus noise, a noise floor",
    ),
    Algorithm(
        name="sage-token",
        group=PAPER,
        paper_row="GRPO + Token",
        guide=TokenGuide(),
        description="q depends on the token itself, as in no other row of the paper: the "
        "forward KL's gradient to a reshaped anchor",
    ),
    Algorithm(
        name="sage-branch",
        group=PAPER,
        paper_row="GRPO + Branch",
        guide=BranchGuide(),
        description="q depends on the prefix alone: grpo's pull to π_ref, 1 to 1.4 times as "
        "strong where entropy is high",
    ),
    Algorithm(
        name="sage-branch-reference",
        group=GUIDES,
        guide=BranchGuide(source="reference"),
        description="sage-branch by the reference's entropies: q·π_ref is one fixed anchor for "
        "the whole run, as the theory assumes",
    ),
    Algorithm(
        name="sage-branch-adaptive",
        group=GUIDES,
        guide=AdaptiveGuide(BranchGuide(), target=0.01),
        description="sage-branch, its strength steered to a mean log q of 0.01 nats a token, "
        "as long as any token is touched",
    ),
    Algorithm(
        name="sage-token-causal",
        group=GUIDES,
        guide=TokenGuide(norm="causal"),
        description="sage-token without a look at later tokens, so that q is the product of Eq. 7",
    ),
    Algorithm(
        name="sage-teacher",
        group=GUIDES,
        guide=TeacherGuide(),
        description="q is a frozen teacher's probability over the reference's: the anchor "
        "leans to the teacher (needs teacher=…)",
    ),
    Algorithm(
        name="grpo-exact",
        group=EXACT,
        settings=_EXACT,
        description="the gradient of Eq. 1, KL of whole completions: against it, what the "
        "guide of the exact rows does",
    ),
    Algorithm(
        name="sage-branch-exact",
        group=EXACT,
        settings=_EXACT,
        guide=BranchGuide(source="reference"),
        description="the gradient of Eq. 6: tokens are paid for the branch points that they "
        "lead to; its optimum is Eq. 4 (of q per token)",
    ),
    Algorithm(
        name="sage-token-exact",
        group=EXACT,
        settings=_EXACT,
        guide=TokenGuide(norm="causal", source="reference"),
        description="the gradient of Eq. 6 with a causal token guide of the reference's surprisal",
    ),
    Algorithm(
        name="bnpo",
        group=PAPER,
        settings={"loss_type": "bnpo"},
        description="normalised by the number of tokens; without it the guide's effect in "
        "bnpo-sage-branch is not isolated",
    ),
    Algorithm(
        name="bnpo-no-kl",
        group=PAPER,
        settings={"loss_type": "bnpo", "beta": 0.0},
        paper_row="BNPO",
        description="bnpo without the KL term, as the paper runs it",
    ),
    Algorithm(
        name="bnpo-sage-branch",
        group=PAPER,
        settings={"loss_type": "bnpo"},
        paper_row="BNPO + Branch",
        guide=BranchGuide(),
        description="against bnpo the guide's effect; against bnpo-no-kl that of guide and KL "
        "together",
    ),
    Algorithm(
        name="dapo",
        group=PAPER,
        settings={"loss_type": "dapo", "epsilon_high": 0.28},
        description=f"{_DAPO}, with KL: without it the guide's effect in dapo-sage-branch is "
        "not isolated",
    ),
    Algorithm(
        name="dapo-no-kl",
        group=PAPER,
        settings={"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0},
        paper_row="DAPO",
        description=f"{_DAPO}, without KL, as the paper runs it",
    ),
    Algorithm(
        name="dapo-sage-branch",
        group=PAPER,
        settings={"loss_type": "dapo", "epsilon_high": 0.28},
        paper_row="DAPO + Branch",
        guide=BranchGuide(),
        description=f"{_DAPO}; against dapo the guide's effect, against dapo-no-kl that of "
        "guide and KL together",
    ),
    Algorithm(
        name="maxrl",
        group=PASS_AT_K,
        settings={"advantages": "maxrl"},
        description="(r − r̄)/r̄: the gradient of log p, truncated at order G − 1; no signal if "
        "all are correct or all wrong",
    ),
    Algorithm(
        name="nsr",
        group=PASS_AT_K,
        settings={"advantages": "nsr"},
        description="wrong −1, correct 0: the gradient of p itself, from wrong answers alone; "
        "no signal if all are correct (its paper leaves entropy_coef=0.001 on)",
    ),
    Algorithm(
        name="w-reinforce",
        group=PASS_AT_K,
        settings={"advantages": "w-reinforce"},
        description="wrong −1, correct 0.1: 1.1 times the gradient of p; every group has a signal",
    ),
    Algorithm(
        name="pkpo",
        group=PASS_AT_K,
        settings={"advantages": "pkpo"},
        description="correct k·C(G−c, k−1)/C(G−1, k−1), wrong 0: the gradient of pass@k, k half "
        "of G; no signal if all are wrong or more than G − k + 1 correct",
    ),
    Algorithm(
        name="maxpo",
        group=PASS_AT_K,
        settings={"advantages": "maxpo"},
        description="the gradient of pass@k by advantages that sum to 0, k half of G; no signal "
        "if all are wrong or more than G − k correct",
    ),
    Algorithm(
        name="pass-at-k",
        group=PASS_AT_K,
        settings={"advantages": "pass-at-k"},
        description="GRPO over all subsets of k, half of G: tends to the gradient of "
        "(2/k)·arcsin√pass@k; no signal if all are wrong or more than G − k correct, and k = G "
        "would leave nothing",
    ),
    Algorithm(
        name="rs-grpo",
        group=PASS_AT_K,
        settings={"advantages": "rs-grpo"},
        description="(e^{2r}/mean − 1)/2: tends to the gradient of ½·log E e^{2r}, between "
        "mean and best reward; no signal if all rewards are equal",
    ),
    Algorithm(
        name="unlikeliness",
        group=PASS_AT_K,
        settings={"advantages": "unlikeliness"},
        description="grpo of r·(1 − rank/4G), rank 0 the least likely completion; no signal if "
        "all rewards are equal; one more scoring of each batch",
    ),
    Algorithm(
        name="f-grpo",
        group=PASS_AT_K,
        settings={"advantages": "f-grpo"},
        description="grpo times √(1 − r̄) of the group: problems that are nearly solved move the "
        "policy less; no signal if all rewards are equal",
    ),
    Algorithm(
        name="ucpo",
        group=PASS_AT_K,
        settings={"advantages": "ucpo"},
        description="grpo plus .1 times how much rarer a correct completion is than the correct "
        "ones of its group; one more scoring of each batch",
    ),
    Algorithm(
        name="clip-cov",
        group=DIVERSITY,
        settings={"token_advantages": "clip-cov"},
        description="grpo without the policy term of a few tokens whose advantage and log π "
        "vary together (Clip-Cov); the KL term stays",
    ),
    Algorithm(
        name="grpo-kl-in-reward",
        group=KL,
        settings={"kl_in": "reward"},
        description="r − β log(π/π_ref) of the whole completion as the reward: the reverse "
        "KL's gradient with its effect on later tokens; one more scoring of each batch",
    ),
    Algorithm(
        name="dph-rl",
        group=DIVERSITY,
        settings={"beta": 0.0, "rehearsal_coef": 0.3},
        description="grpo without its KL term, held to π_ref on correct completions that π_ref "
        "sampled before training (DPH-RL, forward KL); costs a sampling of the "
        "training rows and two more forward passes a step",
    ),
    Algorithm(
        name="grpo-sft",
        group=DIVERSITY,
        settings={"beta": 0.0, "rehearsal": "sft", "rehearsal_coef": 1.0},
        description="the mean of grpo's gradient without KL and of SFT's on correct completions "
        "that π_ref sampled before training, times 2; costs what dph-rl does",
    ),
    Algorithm(
        name="grpo-entropy",
        group=DIVERSITY,
        settings={"entropy_coef": 0.001},
        description="grpo and an entropy bonus of .001 nats a token, as nsr's paper leaves on",
    ),
)
ALGORITHMS = {
    row.name: row for row in sorted(_ROWS, key=lambda row: ALGORITHM_GROUPS.index(row.group))
}
"""Every row of this package, by its name, in the order of its groups."""
