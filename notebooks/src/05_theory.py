# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Theory: what the anchor does, computed exactly
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/05_theory.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/05_theory.ipynb)
#
# **At the end you have** every statement about the method as a theorem with a numerical check, on
# policies so small that all completions can be listed. They answer five questions: which optimum
# does the objective have? Which gradient does the loss have? Where does training with it converge?
# When does the guide bring a rare answer back? When can nothing bring it back?
#
# **Cost.** No GPU, no model, no account; only torch and matplotlib. The run shown here prints its
# time at the end; the machine was busy.
#
# Notation: policy $\pi$, reference $\pi_\mathrm{ref}$, reward $r$, KL coefficient $\beta$, guide
# $q = \prod_t q_t$, anchor $q\,\pi_\mathrm{ref}$, entropy $H$ in nats. Equation numbers are the
# paper's (arXiv 2605.18864). A tree's policy has a logit for every token at every state (prefix),
# and expectations are sums over all completions, in float64. The last section says what follows
# from this and what does not.

# %% [markdown]
# ## Install
# Does nothing if everything is installed. Otherwise it checks the GPU and the packages of the
# image, prints which ones stay and why, and installs the rest. If it replaced a package that was
# already loaded, it asks you to restart the kernel once and run all cells again. The theory is not
# part of the installed package, so outside a clone this cell clones the repository.

# %%
import importlib.util
import sys

spec = importlib.util.find_spec("sage_unsloth")
if spec is None or spec.origin is None:  # a bare folder of that name is not the package
    # %pip install -q --no-deps "lazy_loader>=0.5" "sage_unsloth @ git+https://github.com/sage-unsloth/sage_unsloth"
    pass
if importlib.util.find_spec("research") is None:
    # %system git clone -q --depth 1 https://github.com/sage-unsloth/sage_unsloth clone
    sys.path.insert(0, "clone")

from sage_unsloth import hosted

hosted.install()

# %% tags=["parameters"]
OUT = hosted.runs_folder() / "theory"  # figures and their tables
BETA = 0.05  # β of the paper's training
TREES = 3000  # random trees on which Theorem 4.3 is tried
DRAWS = 2000  # draws of the guides' noise
RUNS = 200  # simulated trainings for each group size
STEPS = 200  # optimizer steps of each

# %%
import time
from functools import partial
from math import log
from pathlib import Path

import torch
from IPython.display import Image

from research.theory.figures import Curve, Panel, plot_anchors, plot_border, plot_curves
from sage_unsloth import BranchGuide, CosineSchedule, RandomGuide, TokenGuide, show_table

started = time.perf_counter()
OUT = Path(OUT)
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## A tree
# In this notebook's tree, *a* is the usual way and nearly always correct. *b* is rare and leads to
# a state with eight equally likely tokens ($H = \log 8 = 2.08$ nats), one of which is correct,
# $y^*$ = `b0`. `BranchGuide` sees that state and gives its tokens $q = 1 + 0.3 \cdot (2.08 - 1.2)$.

# %%
from research.theory.support import tree_example
from research.theory.trees import guide_table

case, tree, ref = tree_example()  # ref: log π_ref of every token at every state
star = tree.index("b0")
branch = guide_table(tree, BranchGuide(ratio=0.3, threshold=1.2), ref, ref)  # log q_t, (C, T)
entropies = tree.table(tree.entropies(ref))
rows = []
for i in (0, 1, 2, 3, 10):
    row = {"completion": "".join(tree.completions[i]), "r": int(tree.rewards[i])}
    row |= {
        "π_ref": f"{case.ref_logps[i].exp():.5f}",
        "H": [round(float(h), 3) for h in entropies[i]],
    }
    rows.append(row | {"q": f"{branch[i].sum().exp():.6f}"})
show_table(rows)

# %% [markdown]
# ## 1. The optima of the objectives
# **Theorem.** Over distributions on completions,
#
# - Eq. 2: $E_\pi[r] - \beta\,\mathrm{KL}(\pi \parallel \pi_\mathrm{ref})$ has its maximum at
#   $\pi \propto \pi_\mathrm{ref}\, e^{r/\beta}$.
# - Eq. 4: $E_\pi[r] - \beta\,E_\pi[\log \frac{\pi}{q\,\pi_\mathrm{ref}}]$ with $q$ held, at
#   $\pi \propto q\,\pi_\mathrm{ref}\, e^{r/\beta}$.
# - Eq. 21: the objective of Eq. 2 $+\, \alpha H(\pi)$, at
#   $\pi \propto \pi_\mathrm{ref}^{\beta/(\alpha+\beta)}\, e^{r/(\alpha+\beta)}$.
# - Eq. 27: $E_\pi[r] - \beta\,\mathrm{KL}(\pi_\mathrm{ref} \parallel \pi)$, at
#   $\pi = \beta\,\pi_\mathrm{ref}/(\lambda - r)$.
#
# *Why.* The first two are $-\beta\,\mathrm{KL}(\pi \parallel \pi^*)$ + const with $\pi^*$ as named,
# the third the same with $\alpha + \beta$. In the fourth,
# $r + \beta\,\pi_\mathrm{ref}/\pi = \lambda$ for all $y$.
#
# **Check.** The objective's gradient vanishes there (all four are concave, so that is the maximum),
# and it does not at π_ref.

# %%
from research.theory.optima import (
    entropy_bonus_optimum,
    forward_kl_optimum,
    guided_optimum,
    objective,
)

completions, rewards, log_q = case.ref_logps, case.rewards, branch.sum(1)
optima = {
    "Eq. 2": (guided_optimum(completions, rewards, BETA), {}),
    "Eq. 4": (guided_optimum(completions, rewards, BETA, log_q), dict(log_guide=log_q)),
    "Eq. 21, α = 0.05": (entropy_bonus_optimum(completions, rewards, BETA, 0.05), dict(alpha=0.05)),
    "Eq. 27": (forward_kl_optimum(completions, rewards, BETA), dict(kl="forward")),
}
rows = []
for name, (optimum, terms) in optima.items():
    slopes = []
    for probabilities in (optimum, completions.exp()):
        logits = probabilities.log().requires_grad_()
        value = objective(logits.log_softmax(0), completions, rewards, BETA, **terms)
        slopes.append(torch.autograd.grad(value, logits)[0].norm().item())
    row = {"optimum": name, "|∇J| there": f"{slopes[0]:.0e}", "|∇J| at π_ref": f"{slopes[1]:.0e}"}
    row |= {"π(y*)": f"{optimum[star]:.6f}", "wrong": f"{optimum[rewards == 0].sum():.1e}"}
    rows.append(row)
show_table(rows)

# %% [markdown]
# They differ in two ways. First, wrong answers keep e^(−1/β) of their odds with the reverse KL, and
# about β of their probability with the forward KL. Second, the odds between two correct answers:
# Eq. 2 and Eq. 27 keep those of π_ref for any β, so neither brings back a rare answer. An entropy
# bonus flattens the odds, also among wrong answers. The guide multiplies them by q(y\*)/q(a+).

# %%
betas = [0.02 * 1.25**i for i in range(22)]
laws = {
    "Eq. 2, KL": lambda b: guided_optimum(completions, rewards, b),
    "Eq. 4, Branch": lambda b: guided_optimum(completions, rewards, b, log_q),
    "Eq. 21, α = β/4": lambda b: entropy_bonus_optimum(completions, rewards, b, b / 4),
    "Eq. 27, forward KL": lambda b: forward_kl_optimum(completions, rewards, b),
}
found = {name: [law(b) for b in betas] for name, law in laws.items()}
wrong = {n: Curve(betas, [float(p[rewards == 0].sum()) for p in ps]) for n, ps in found.items()}
odds = {n: Curve(betas, [float(p[star] / p[0]) for p in ps]) for n, ps in found.items()}
panels = [
    Panel(
        title="Wrong answers",
        xlabel="β",
        ylabel="probability",
        curves=wrong,
        log="xy",
        ylim=(1e-12, 1),
    ),
    Panel(
        title="Rare against usual right answer",
        xlabel="β",
        ylabel="odds π(y*) / π(a+)",
        curves=odds,
        log="x",
        ylim=(0, None),
    ),
]
Image(plot_curves(panels, OUT / "optima.png", "The tree above; exact optima."))

# %% [markdown]
# ## 2. The gradient of each penalty
# **Theorem.** On-policy, for $d = \log f - \log \pi$ with an anchor $f$ held constant and $\sum$
# over the next token:
# - k3 *differentiated as a loss* has the expected gradient $-\sum f\, \nabla \log \pi$: a
#   **forward**-KL pull to $f$, though k3's value is the reverse KL.
# - with the ratio $\pi/\pi_\mathrm{old}$ inside (`k3-is`), or as k2, it has the **reverse** KL's;
#   k1 as a loss has none, in the reward it has the reverse KL's.
# - k3 in the reward has reverse − forward, which vanishes to first order around $\pi = f$: hardly a
#   penalty.
# - $-\mathrm{sg}[r] \log \pi$, $r = f/\pi$ (`forward-kl`) has the forward KL's; $r \log r - (r -
#   1)$ differentiated through $\pi$ has neither.
#
# *Why.* $\nabla k_3 = (1 - e^d)\, \nabla \log \pi$, with $E_\pi[\nabla \log \pi] = 0$ and
# $E_\pi[e^d\, \nabla \log \pi] = \sum f\, \nabla \log \pi$. With the ratio inside, on each single
# sample, $\nabla(\rho\, k_3) = (k_3 + 1 - e^d)\, \nabla \log \pi = -d\, \nabla \log \pi$.
#
# **Check**, on a tree with completions of different length. Per token, a loss has that of the
# states' KLs, at the visits as they are ("per state"): how a token moves the later states is in no
# per-token penalty. Treating the completion as one action ("completion") it is the KL between
# distributions over completions. In the reward, with the sum of later costs, k1 has that one too.

# %%
from research.theory.kl_gradients import gradient_table
from research.theory.trees import Tree

generator = torch.Generator().manual_seed(0)
small = Tree.of({"aaa": 1.0, "aab": 0.0, "ab": 0.0, "ba": 1.0, "bba": 0.0, "bbb": 1.0, "c": 0.0})
logits, small_ref = 0.4 * torch.randn((2, small.num_edges), generator=generator).double()
small_ref = small.logps(small_ref)
rows = gradient_table(small, logits, small_ref)
for row in rows:
    row |= {name: f"{row[name]:.2f}" for name in ("off forward", "off reverse")}
show_table(rows)

# %% [markdown]
# So GRPO's usual k3 term **is a forward-KL penalty in expectation**, and the optimum that goes with
# it is Eq. 27, not Eq. 2 (state by state: section 5). `off …` is the
# relative distance to the forward and the reverse gradient; a row with 0.00 in neither column and
# no name has neither.

# %% [markdown]
# ## 3. What the guide does to a token
# **Theorem (Branch).** $q_t$ depends on the prefix alone, so per token Branch multiplies the pull:
# the gradient is $\sum_s d(s)\, q(s)\, \nabla \mathrm{KL}(\pi_\mathrm{ref} \parallel \pi)(s)$, with
# $d(s)$ the visits of a state. The anchor's shape at a state does not change.
# **Random** has $E[q] = 1$ whatever the token: GRPO plus noise. Only **Token** reshapes.
#
# *Why.* The k3 gradient is linear in q: a q(s) comes before the sum over tokens, an independent one
# enters by its mean.
#
# **Check.** The two sides for Branch; and the anchor's shift, the total variation between q·π_ref
# (normalised at each state) and π_ref, of the mean guide over more and more draws of the noise.

# %%
from research.theory.kl_gradients import expected_gradient, forward_kl_gradient
from research.theory.trees import anchor_shift, edge_guide

policy = small.logps(logits)
small_branch = guide_table(small, BranchGuide(ratio=0.3, threshold=0.5), policy, small_ref)
left = expected_gradient(small, logits, small.table(small_ref) + small_branch, "k3")
right = forward_kl_gradient(small, logits, small_ref, edge_guide(small, small_branch, policy))
unguided = forward_kl_gradient(small, logits, small_ref)
print(f"Branch, loss against Σ d q ∇KL: {(left - right).norm() / right.norm():.0e} apart")
print(f"                 without the q: {(left - unguided).norm() / right.norm():.0e} apart")

# %%
guides = {"Random": RandomGuide(), "Token": TokenGuide(), "Branch": BranchGuide(0.3, 0.5)}
rows = []
for name, guide in guides.items():
    generator.manual_seed(1)
    draw = partial(guide_table, small, guide, policy, small_ref, generator=generator)
    draws = torch.stack([draw() for _ in range(DRAWS)]).exp()
    row = {"guide": name}
    for n in (1, DRAWS // 20, DRAWS):
        row[f"{n} draws"] = f"{anchor_shift(small, draws[:n].mean(0).log(), policy, small_ref):.5f}"
    rows.append(row)
show_table(rows)

# %% [markdown]
# Random's shift goes to 0 with more draws, Branch has none, Token's stays.
#
# **Theorem.** $q\,\pi_\mathrm{ref}$ does not sum to 1, so the mean of k3 to it is the
# *generalised* KL, $\tilde D(\pi \parallel q\,\pi_\mathrm{ref}) + \sum_s d(s)\, (\sum_v
# q\,\pi_\mathrm{ref} - 1)$. It is no KL and cannot be compared with a run without a guide: hence
# two metrics, `kl/ref_k3` and `kl/anchor_k3`.

# %%
from research.theory.kl_gradients import k3_mean

mean = k3_mean(small, policy, small_ref, edge_guide(small, small_branch, policy).log())
plain = k3_mean(small, policy, small_ref, torch.zeros(small.num_edges).double())
print(f"to q·π_ref: E[k3] {mean['k3']:.6f} = D̃ {mean['pseudo_kl']:.6f} + {mean['excess']:.6f}")
print(f"to π_ref:   E[k3] {plain['k3']:.6f} = KL {plain['pseudo_kl']:.6f}")

# %% [markdown]
# ## 4. Anchor, guide, optimum
# The paper's Fig. 1 in numbers, the three guides at their own settings (step 0, one draw) on a tree
# with three right answers; β = 0.5 here, so that wrong answers stay in view. A completion's anchor
# is its π_ref times its q; the optimum (Eq. 4) is that of Eq. 2 times the same q. Branch lifts what
# goes through uncertain states, wrong answers as well as right ones.

# %%
from research.theory.support import from_anchor_to_optimum
from research.theory.trees import fork_tree

fork, fork_ref = fork_tree()
panels = {}
for name, guide in (guides | {"Branch": BranchGuide()}).items():
    generator.manual_seed(5)
    q = guide_table(fork, guide, fork_ref, fork_ref, generator=generator)
    panels[name] = from_anchor_to_optimum(fork, fork_ref, 0.5, q)
note = "β = 0.5; guides at their defaults, step 0, one draw of the noise."
Image(plot_anchors(panels, OUT / "anchors.png", note))

# %% [markdown]
# ## 5. Where the implemented loss converges
# **Theorem.** A per-token penalty without credit for later tokens rests, state by state from the
# leaves, at
#
# - $\pi(a|s) = \beta\, q\,\pi_\mathrm{ref}/(\lambda_s - Q(s,a))$ for k3 (Eq. 27 with $\beta\, q(s)$
#   instead of $\beta$),
# - $\pi(a|s) \propto q\,\pi_\mathrm{ref}\, e^{Q(s,a)/\beta}$ for `k3-is` and k2, where $q(s)$
#   cancels: **there Branch does nothing at all**,
#
# with $Q$ the expected reward alone. *Why.* At rest $\pi(a|s)\,(Q - V) = \beta\, q\,(\pi -
# \pi_\mathrm{ref})$, or $\pi(a|s)\,(Q - \beta \log \frac{\pi}{q\,\pi_\mathrm{ref}}) =
# \mathrm{const} \cdot \pi$. Neither is Eq. 4, because there the KL and the guide of later tokens
# count for earlier ones.
#
# **Check.** The expected update of the loss, followed until it rests, against the closed form; and
# the distance (total variation) to Eq. 4.

# %%
from research.theory.optima import ascend, expected_update, per_token_optimum

q_edge = edge_guide(tree, branch, ref).log()
eq4 = guided_optimum(completions, rewards, BETA, log_q)
update = partial(expected_update, tree, ref_logps=ref, beta=BETA)
follow = partial(ascend, tree, ref, tolerance=1e-8)
paths = {
    "GRPO (k3)": follow(partial(update, kl_estimator="k3")),
    "k3, Branch": follow(partial(update, kl_estimator="k3", log_guide=branch)),
    "k3-is": follow(partial(update, kl_estimator="k3-is")),
    "k3-is, Branch": follow(partial(update, kl_estimator="k3-is", log_guide=branch)),
}
rest = {name: tree.completion_logps(path[-1]).exp() for name, path in paths.items()}
rows = []
for name, probability in rest.items():
    kl, q = "reverse" if "is" in name else "forward", q_edge if "Branch" in name else None
    closed = tree.completion_logps(per_token_optimum(tree, ref, BETA, kl=kl, log_guide=q)).exp()
    row = {
        "loss": name,
        "π(y*) at rest": f"{probability[star]:.6f}",
        "closed form": f"{closed[star]:.6f}",
    }
    rows.append(row | {"to Eq. 4": f"{(probability - eq4).abs().sum() / 2:.4f}"})
show_table(rows)
print(f"\nEq. 2 names {optima['Eq. 2'][0][star]:.6f}, Eq. 4 {eq4[star]:.6f}")

# %% [markdown]
# The paper does not mention two consequences. All four keep *more* of y\* than Eq. 4 requires,
# since a loss without credit does not see that *b* costs KL later. And Branch with k3 keeps
# **less** of it than GRPO: the stronger pull at the eight tokens pulls away from the correct one,
# so choosing *b* pays less. Eq. 4 promises the opposite.

# %% [markdown]
# ## 6. Sequence credit
# **Theorem.** The gradient of Eq. 6,
#
# $$J_q = E_\pi[r - \beta \sum_t (\log \pi - \log \pi_\mathrm{ref} - \log q_t)]$$
#
# with $q$ held, is that of the `k3-is` loss plus a credit for later tokens,
#
# $$\beta\, b_t\, \nabla \log \pi(y_t), \qquad b_t = \sum_{t' > t} (\log q_{t'} - k_{3,t'})$$
#
# with k3 to $\pi_\mathrm{ref}$. ($\pi_\mathrm{ref}$ sums to 1, so the mean of k3 is that of
# $\log \pi - \log \pi_\mathrm{ref}$; to $q\,\pi_\mathrm{ref}$ it would not be.) So training with it
# rests at Eq. 4. *Why.* The score function gives
# $E[\sum_t \nabla \log \pi(y_t) \sum_{t' \ge t} c_{t'}]$ with the cost $c$ of each token; the k3-is
# loss is the term $t' = t$, sample by sample (section 2).
#
# A condition that is easy to miss: this needs a q_t that is known when y_t is. `TokenGuide` ranks a
# token among *all* tokens of its completion, later ones included, so a token also moves the guide
# of earlier ones, and the credit must be that of the whole completion.
#
# **Check.** Relative distance to the enumerated gradient of Eq. 6.

# %%
from research.theory.optima import CREDITS, guided_gradient

rows = []
quiet = TokenGuide(sigma=CosineSchedule(0.0, 0.0))  # noise averages out and would hide the rest
for name, guide in {"Branch": BranchGuide(0.3, 0.5), "Token": quiet}.items():
    q = guide_table(small, guide, policy, small_ref)
    exact = guided_gradient(small, logits, small_ref, 0.3, q)
    row = {"guide": name}
    for credit in CREDITS:
        found = expected_update(small, logits, small_ref, 0.3, "k3-is", log_guide=q, credit=credit)
        row[f"credit: {credit}"] = f"{(found - exact).norm() / exact.norm():.1e}"
    rows.append(row)
show_table(rows)

# %%
for kl, credit in (("k3-is", "later"), ("k3", "later"), ("k3-is", "guide")):
    credited = partial(update, kl_estimator=kl, log_guide=branch, credit=credit)
    paths[f"{kl}, Branch, credit: {credit}"] = follow(credited)
rows = []
for name, path in paths.items():
    p = tree.completion_logps(path[-1]).exp()
    rows.append(
        {
            "loss": name,
            "π(y*) at rest": f"{p[star]:.7f}",
            "to Eq. 4": f"{(p - eq4).abs().sum() / 2:.0e}",
        }
    )
show_table(rows)

# %%
curves = {}
for name, path in paths.items():
    if name != "k3-is":
        every, last = range(0, 800, 5), len(path) - 1
        course = [tree.completion_logps(path[min(i, last)]).exp()[star].item() for i in every]
        label = "k3-is, with or without Branch" if name == "k3-is, Branch" else name
        curves[label] = Curve(every, course)
panel = Panel(
    title="",
    xlabel="steps of 0.25 along the natural gradient",
    ylabel="π(y*)",
    curves=curves,
    ylim=(0, None),
)
note = (
    f"β = {BETA}; expected updates, q from π_ref; Eq. 4: {eq4[star]:.4f}, π_ref: "
    f"{completions[star].exp():.5f}."
)
Image(plot_curves([panel], OUT / "rest.png", note))

# %% [markdown]
# Eq. 4 is reached, to the last digit, by `k3-is` with the credit and by nothing else here. The
# guide's part of the credit alone (`guide`), without the later tokens' KL, leads further away than
# none.
#
# A second condition: all of this is for a *sum* over tokens (`dr_grpo`; `dapo` and `bnpo` in a
# large batch). `loss_type="grpo"` takes the mean over each completion's own tokens, which weighs
# completions by 1/length, reward and penalty alike. Where lengths differ that is another direction,
# and another point of rest:

# %%
q = guide_table(small, BranchGuide(0.3, 0.5), policy, small_ref)
whole = small.completion_logps(small_ref)
named = guided_optimum(whole, small.rewards, 0.3, q.sum(1))
credited = partial(
    expected_update,
    small,
    ref_logps=small_ref,
    beta=0.3,
    kl_estimator="k3-is",
    log_guide=q,
    credit="later",
)
texts = ["".join(completion) for completion in small.completions]
at_optimum = {c: f"{p:.4f}" for c, p in zip(texts, named.tolist(), strict=True)}
rows = [{"loss_type": "Eq. 4"} | at_optimum]
for loss_type in ("dr_grpo", "grpo"):
    at_rest = ascend(small, small_ref, partial(credited, loss_type=loss_type), tolerance=1e-8)[-1]
    found = small.completion_logps(at_rest).exp().tolist()
    rows.append(
        {"loss_type": loss_type}
        | {"".join(c): f"{p:.4f}" for c, p in zip(small.completions, found, strict=True)}
    )
show_table(rows)

# %% [markdown]
# The shortest correct answer (`ba`) gains what the longer ones lose.
#
# **Length.** Branch has $q_t \ge 1$, so $\prod_t q_t$ grows with the number of uncertain tokens,
# and the objective of Eq. 6 pays for length. Centring, $\log q_t - m$ with $m$ the mean $\log q$
# of a token over the prompt's other completions, takes that away. Between completions of equal
# length it changes nothing in Eq. 4. Below, every token is as uncertain as every other (log 5
# nats), so that a guide has nothing to say: only the length differs.

# %%
from research.theory.trees import centred_guide, chain_tree

chain, uniform = chain_tree(8)
q = guide_table(chain, BranchGuide(), uniform, uniform)
tokens, whole = chain.mask.sum(1), chain.completion_logps(uniform)
settings = {"Eq. 2": 0 * q, "Eq. 4": q, "Eq. 4, centred": centred_guide(chain, q, uniform)}
rows, curves = [], {}
for name, guide in settings.items():
    right = guided_optimum(whole, chain.rewards, BETA, guide.sum(1)) * chain.rewards
    share = [(right[tokens == t].sum() / right.sum()).item() for t in range(1, 9)]
    curves[name] = Curve(range(1, 9), share)
    mean = sum(t * s for t, s in enumerate(share, 1))
    rows.append(
        {
            "optimum": name,
            "mean tokens of a right answer": f"{mean:.4f}",
            "4 tokens and more": f"{sum(share[3:]):.5f}",
        }
    )
show_table(rows)
panel = Panel(
    title="", xlabel="tokens", ylabel="share of the right answers", curves=curves, log="y"
)
note = f"β = {BETA}; a right end, three wrong ones and going on at every token, all equally likely."
Image(plot_curves([panel], OUT / "length.png", note))

# %% [markdown]
# ## 7. The strength of the penalty changes during training
# **Theorem.** GRPO divides advantages by the group's standard deviation. In a large group the
# update is then $1/\mathrm{sd}(r)$ times that of Eq. 6 at $\beta \cdot \mathrm{sd}(r)$: as the
# policy gets better (or hopeless), the KL and the guide fade beside the reward. (In small groups sd
# is an estimate, and the division biased.) So the paper's β = 0.05 means a different strength for
# each prompt.
#
# **Check** the identity at policies that solve the prompt more and more often.

# %%
rows = []
for reach in (0.0, 0.02, 0.05, 0.2):
    at = tree.policy(guided_optimum(completions, reach * rewards, BETA))
    success = float((tree.completion_logps(at).exp() * rewards).sum())
    deviation = (success * (1 - success)) ** 0.5
    scaled = expected_update(
        tree, at, ref, BETA, "k3-is", log_guide=branch, credit="later", scale_rewards=True
    )
    exact = guided_gradient(tree, at, ref, BETA * deviation, branch) / deviation
    row = {
        "E[r]": f"{success:.4f}",
        "sd(r)": f"{deviation:.4f}",
        "β·sd(r)": f"{BETA * deviation:.5f}",
    }
    rows.append(row | {"apart": f"{(scaled - exact).norm() / exact.norm():.0e}"})
show_table(rows)

# %% [markdown]
# ## 8. Theorem 4.3
# **Theorem.** If
# $\frac{q(y^*)}{E_\mathrm{RLVR}[q]} \ge \frac{\delta}{\pi_\mathrm{RLVR}(y^*)}$, then
# $\pi_\mathrm{SAGE}(y^*) \ge \delta$. It is an equivalence, because
#
# $$\pi_\mathrm{SAGE}(y^*) = \pi_\mathrm{RLVR}(y^*) \cdot \frac{q(y^*)}{E_\mathrm{RLVR}[q]}.$$
#
# **Check.** Two worked examples. A takes entropies as given that no tree can have (the first
# token's must be equal for both answers); B is the tree above.

# %%
from research.theory.support import literal_example, support_condition

rows = []
for name, example in {"A": literal_example(), "B": case}.items():
    found = support_condition(example)
    row = {
        "example": name,
        "δ": example.delta,
        "q(y*)": f"{found['guide']:.6f}",
        "E[q]": f"{found['mean_guide']:.7f}",
    }
    row |= {
        "q(y*)/E[q]": f"{found['lift']:.6f}",
        "δ/π_RLVR(y*)": f"{found['needed']:.6f}",
        "holds": found["holds"],
    }
    rows.append(
        row | {"π_RLVR(y*)": f"{found['plain']:.7f}", "π_SAGE(y*)": f"{found['guided']:.7f}"}
    )
show_table(rows)

# %% [markdown]
# **How far it reaches.** On random trees (guide of π_ref, δ = 0.01), every right answer is a point:
# right of δ it is inside anyway, above the border the guide brings it in, and below lift 1 the
# guide makes it *rarer*, because the other right answers pass more uncertain states than it does.

# %%
from research.theory.support import search_trees

points = search_trees(TREES, beta=BETA, delta=0.01)
kinds = [(row["inside_before"], row["inside_after"]) for row in points]
rarer = sum(row["lift"] < 1 and not row["inside_before"] for row in points)
print(
    f"{len(points)} right answers, {sum(not before for before, _ in kinds)} of them outside δ: "
    f"brought in "
    f"{kinds.count((False, True))}, made rarer {rarer}; pushed out {kinds.count((True, False))}"
)
print(
    f"lift from {min(row['lift'] for row in points):.3f} to "
    f"{max(row['lift'] for row in points):.3f}"
)
note = f"{TREES} random trees of up to 4 tokens; β = {BETA}, δ = 0.01, BranchGuide() at π_ref."
Image(plot_border(points, 0.01, OUT / "condition.png", note))

# %% [markdown]
# So the guide moves a border, by a factor that is limited by its clip and the number of uncertain
# tokens. It does not open up new regions.
#
# **And its guide does not last.** The theorem holds q fixed. In training q_t is that of the
# *current* policy, and when the policy has become sure among the eight tokens, their guide is 1.
# Solving Eq. 4 with the guide of its own solution:

# %%
from research.theory.support import own_guide_optimum

four = {"".join(c): float(c[-1] in "+0123") for c in tree.completions}
rows = []
for name, of in {"one of eight right": tree, "four of eight right": Tree.of(four)}.items():
    own, table = own_guide_optimum(of, ref, BETA, BranchGuide())
    plain = guided_optimum(completions, of.rewards, BETA)[star]
    fixed = guided_optimum(completions, of.rewards, BETA, log_q)[star]
    row = {
        "tree": name,
        "Eq. 2": f"{plain:.7f}",
        "q of π_ref": f"{log_q[star].exp():.4f}",
        "Eq. 4": f"{fixed:.7f}",
    }
    row |= {"its own q": f"{table[star].sum().exp():.4f}", "Eq. 4 with it": f"{own[star]:.7f}"}
    rows.append(row)
show_table(rows)

# %% [markdown]
# What is left at small β is uncertainty among *right* continuations; the example of Theorem 4.3
# ends where it would have without a guide. The same by following the losses with q computed anew
# from the current policy at every step, as training does:

# %%
branch_now = partial(guide_table, tree, BranchGuide(), ref_logps=ref)
token_now = partial(guide_table, tree, quiet, ref_logps=ref)
losses = {
    "k3, no guide": lambda z: update(z, kl_estimator="k3"),
    "k3, Branch": lambda z: update(z, kl_estimator="k3", log_guide=branch_now(z)),
    "k3, Token": lambda z: update(z, kl_estimator="k3", log_guide=token_now(z)),
    "k3-is, Branch, credit: later": lambda z: update(
        z, kl_estimator="k3-is", log_guide=branch_now(z), credit="later"
    ),
}
rows = []
for name, loss in losses.items():
    at_rest = ascend(tree, ref, loss, tolerance=1e-6)[-1]
    rows.append(
        {"loss": name, "π(y*) at rest": f"{tree.completion_logps(at_rest).exp()[star]:.6f}"}
    )
show_table(rows)

# %% [markdown]
# Branch has no effect left in either. Token, which ranks tokens within a completion, always has
# one.

# %% [markdown]
# ## 9. Mode seeking and mode covering
# **Theorem.** Fitting one Gaussian to a mixture, the reverse KL settles on one mode, the forward KL
# has the mixture's mean and variance (the paper's Fig. 5). By section 2 the *implemented* penalty
# decides: k3 as a loss covers, `k3-is` seeks, from the same start.
#
# **Check.** Descent on the package's penalties, expectations by quadrature, against the mixture's
# own moments.

# %%
from research.theory.support import fit_gaussian, mixture_logpdf, normal_logpdf

mixture = dict(means=[-2.5, 2.5], deviations=[0.8, 0.8], weights=[0.7, 0.3])
x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
target = mixture_logpdf(x, **mixture)
first, second = (((target.exp() * x**n).sum() * (x[1] - x[0])).item() for n in (1, 2))
fits = {
    "k3: forward KL": fit_gaussian(x, target, "k3", (-1.0, 2.0)),
    "k3-is: reverse KL": fit_gaussian(x, target, "k3-is", (-1.0, 2.0)),
    "k3-is, started on the right": fit_gaussian(x, target, "k3-is", (2.0, 1.0)),
}
rows = {"the mixture's moments": (first, (second - first**2) ** 0.5)} | fits
show_table([{"fit": n, "mean": f"{m:.5f}", "deviation": f"{s:.5f}"} for n, (m, s) in rows.items()])

# %%
view = x[x.abs() < 7]
densities = {"mixture": mixture_logpdf(view, **mixture)}
densities |= {name: normal_logpdf(view, *fit) for name, fit in fits.items()}
curves = {name: Curve(view.tolist(), d.exp().tolist()) for name, d in densities.items()}
panel = Panel(title="", xlabel="x", ylabel="density", curves=curves, labels="legend")
note = "0.7 N(−2.5, 0.8²) + 0.3 N(2.5, 0.8²); descent on the package's penalties, by quadrature."
Image(plot_curves([panel], OUT / "gaussians.png", note))

# %% [markdown]
# Completions are no Gaussians: a softmax can hold every mode, so "seeking" is not forced on it. For
# the method, the figure shows that GRPO's k3 already pulls towards covering π_ref, with or without
# a guide.

# %% [markdown]
# ## 10. Completions that are never sampled
# **Theorem.** Until $y^*$ is drawn, no update depends on its reward or its guide: a run with
# $r(y^*) = 1$, $q(y^*) = 1.4$ and one with $r(y^*) = 0$, $q = 1$ are the same run, because an
# update is a function of what was drawn. If $\pi(y^*)$ stayed at $p$, $n$ rollouts a step would
# miss it for $S$ steps with probability $(1 - p)^{nS}$.
#
# **Check.** Trainings that draw with the same random numbers; those that never met y\* must agree
# bitwise.

# %%
from research.theory.support import train_by_sampling

p = 0.002
start = torch.tensor([0.3, p] + [(0.7 - p) / 6] * 6).double().log()
alone, beside = torch.eye(8).double()[1], torch.eye(8).double()[:2].sum(0)
guide = torch.eye(8).double()[1] * log(1.4)
simulate = partial(train_by_sampling, start, index=1, steps=STEPS, runs=RUNS, beta=BETA)
one = simulate(rewards=beside, log_guide=guide, num_generations=8)
other = simulate(rewards=beside - alone, log_guide=None, num_generations=8)
missed = ~one.seen
print(
    f"{int(missed.sum())} of {RUNS} runs never drew y*; bitwise the same without its reward and "
    f"guide: "
    f"{torch.equal(one.final[missed], other.final[missed])}"
)

# %% [markdown]
# How often is it sampled at all, and if it is, is it reinforced (to at least twice its probability
# under π_ref)? On the left, y\* is the only correct answer. On the right, a usual answer (0.3) is
# correct too. Bands: 95 % (Wilson) over runs.

# %%
from research.theory.support import wilson_interval

groups = [2, 4, 8, 16, 32, 64, 128, 256]
cases = {"y* is the only right answer": alone, "y* beside a usual right answer": beside}
panels = []
for title, r in cases.items():
    plain = [simulate(rewards=r, log_guide=None, num_generations=n) for n in groups]
    guided = [simulate(rewards=r, log_guide=guide, num_generations=n) for n in groups]
    shares = {"reinforced, q(y*) = 1.4": [run.final[:, 1] >= 2 * p for run in guided]}
    shares |= {"reinforced, GRPO": [run.final[:, 1] >= 2 * p for run in plain]}
    shares |= {"drawn, GRPO": [run.seen for run in plain]}
    curves = {"drawn, if π stayed": Curve(groups, [1 - (1 - p) ** (n * STEPS) for n in groups])}
    for name, share in shares.items():
        low, high = zip(*(wilson_interval(int(s.sum()), RUNS) for s in share), strict=True)
        curves[name] = Curve(groups, [s.double().mean().item() for s in share], low, high)
    panels.append(
        Panel(
            title=title,
            xlabel="rollouts a step",
            ylabel="share of runs",
            curves=curves,
            log="x",
            ylim=(-0.03, 1.03),
        )
    )
note = (
    f"π_ref(y*) = {p}, {STEPS} steps, {RUNS} runs a point, β = {BETA}, one prompt, learning "
    f"rate 0.5 on the logits."
)
Image(plot_curves(panels, OUT / "support.png", note))

# %% [markdown]
# Two limits, and the guide removes neither. Rare answers that are alone are a matter of rollouts.
# Beside a usual right answer, y\* is drawn and *still* not reinforced: both have the same
# advantage, the usual one is drawn more often, and y\* pays for it through the softmax. Once it is
# rare, k3 pulls its logit back by about β q π_ref(y\*) for each unit of learning rate, which a run
# does not live to see: the fixed points of section 5 (found along the natural gradient, whose speed
# does not depend on how rare a completion is) are where training points, not where it gets.

# %%
print(f"{time.perf_counter() - started:.0f} s")

# %% [markdown]
# ## What this shows and what it does not
# - Exact, and about the code that is run: the penalties are `sage_unsloth.objective.loss`, the
#   guides `sage_unsloth.objective.guides`.
# - Here each state has its own logits. A network shares parameters, so it generalises across states
#   and never reaches a fixed point; take
#   directions from these results, not sizes. AdamW, the clip of ratios (inactive on-policy) and
#   minibatches are left out.
# - Sections 5 and 6 sum over tokens; the default of the paper's loss, `grpo`, does not (section 6).
# - The clamps of Unsloth's loss (k3 above 10 has no gradient there) do not bite at the ratios of
#   these examples.
# - Sampling at a temperature other than 1, or with min-p, draws from another distribution than the
#   π of the loss: none of the above covers that.
