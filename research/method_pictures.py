"""Draws the two pictures of docs/method.md: what q does to a distribution, and the GRPO loop.

    python -m research.redraw docs/pictures

Every number in them comes from the guides, the advantages and the optima that training and theory
use; the next-token distributions are made up.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.theory.optima import guided_optimum
from research.theory.support import tree_example
from sage_unsloth.figures import BLUE, VERMILION, write_table
from sage_unsloth.methods import group_advantages
from sage_unsloth.objective.guides import BranchGuide, TokenGuide
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.objective.signals import TokenSignals

SURE = (0.93, 0.03, 0.02, 0.01, 0.006, 0.004)
UNDECIDED = (0.34, 0.24, 0.17, 0.12, 0.08, 0.05)
REFERENCE, ANCHOR, GUIDE, LINE = "#888888", BLUE, VERMILION, "#333333"
REF = r"$\pi_{\mathrm{ref}}$"
REWARDS = (1.0, 0.0, 0.0, 0.0)


def log_guide_of(guide: Any, probabilities: tuple[float, ...]) -> Tensor:
    """log q of each next token of one state; for `TokenGuide` the candidates are its completion."""
    logps = torch.tensor([probabilities]).log()
    entropies = -(logps.exp() * logps).sum(-1, keepdim=True).expand_as(logps)
    signals = TokenSignals(
        policy_logps=logps,
        ref_logps=logps,
        mask=torch.ones_like(logps),
        entropies=entropies.contiguous(),
    )
    return guide.log_guide(signals, step=0, max_steps=1)[0]


def rows() -> list[dict[str, Any]]:
    """Reference and anchor of each panel: three states, and the optimum over completions."""
    still = TokenGuide(sigma=CosineSchedule(0.0, 0.0))  # its mean: without the noise
    states = {
        "Branch, a sure state": (BranchGuide(), SURE),
        "Branch, an undecided state": (BranchGuide(), UNDECIDED),
        "Token, the same state": (still, UNDECIDED),
    }
    table = []
    for panel, (guide, probabilities) in states.items():
        q = log_guide_of(guide, probabilities).exp()
        for number, (p, factor) in enumerate(zip(probabilities, q, strict=True), start=1):
            anchor = p * float(factor)
            table.append({"panel": panel, "item": number, "reference": p, "anchor": anchor})
    case, _, _ = tree_example()
    plain = guided_optimum(case.ref_logps, case.rewards, case.beta)
    guided = guided_optimum(case.ref_logps, case.rewards, case.beta, case.log_guide)
    table.append(
        {
            "panel": "Optimum, a rare correct completion",
            "item": case.index,
            "reference": float(plain[case.index]),
            "anchor": float(guided[case.index]),
        }
    )
    return table


def draw_guide(path: Path) -> None:
    """π_ref and q·π_ref at three states, and what the lift of a rare completion comes to."""
    from matplotlib.figure import Figure

    table = rows()
    panels = list(dict.fromkeys(row["panel"] for row in table))
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    axes = figure.subplots(1, len(panels), width_ratios=[3, 3.3, 3.3, 1.9])
    for axis, panel in zip(axes, panels, strict=True):
        part = [row for row in table if row["panel"] == panel]
        x = range(len(part))
        before, after = ([row[key] for row in part] for key in ("reference", "anchor"))
        axis.bar(
            [at - 0.2 for at in x], before, 0.4, color=REFERENCE, label=r"$\pi_{\mathrm{ref}}$"
        )
        axis.bar(
            [at + 0.2 for at in x], after, 0.4, color=ANCHOR, label=r"$q\cdot\pi_{\mathrm{ref}}$"
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 1.28 * max(after))
        if len(part) == 1:
            axis.set_title("a rare correct\ncompletion", fontsize=10)
            axis.set_xticks([-0.22, 0.26], [r"$\pi^*$", r"$\pi_{\mathrm{SAGE}}$"])
            axis.set_xlim(-0.65, 0.65)
            for at, value in ((-0.2, before[0]), (0.2, after[0])):
                axis.text(at, value, f"{value:.4f}"[1:], ha="center", va="bottom", fontsize=9)
            continue
        axis.set_title(panel.replace(", ", " guide,\n"), fontsize=10)
        axis.set_xlabel("next token")
        axis.set_xticks(list(x), [str(row["item"]) for row in part])
        axis.text(
            0.98,
            0.98,
            f"sum {sum(after):.2f}",
            color=ANCHOR,
            transform=axis.transAxes,
            ha="right",
            va="top",
        )
        for at, (old, new) in enumerate(zip(before, after, strict=True)):
            if new / old > 1.005:
                axis.text(at + 0.2, new, f"×{new / old:.2f}", ha="center", va="bottom", fontsize=8)
    axes[0].set_ylabel("probability")
    axes[0].legend(loc="center right", frameon=False)
    write_table(path.with_suffix(".csv"), table)
    figure.savefig(path, dpi=150)


def draw_loop(path: Path) -> None:
    """Prompt, group, rewards, advantages, loss, update; the guide acts on the KL's target alone."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    advantages = group_advantages.grpo(torch.tensor([REWARDS]))[0]
    figure = Figure(figsize=(9, 4.3))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 100), ylim=(-2, 48))
    axis.set_axis_off()

    def box(corners: tuple, text: str, colour: str = LINE) -> None:
        left, right, bottom, top = corners
        frame = {"boxstyle": "round,pad=0,rounding_size=1.5", "facecolor": "white", "lw": 1.6}
        axis.add_patch(
            FancyBboxPatch((left, bottom), right - left, top - bottom, edgecolor=colour, **frame)
        )
        x, y = (left + right) / 2, (bottom + top) / 2
        axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=10.5)

    def arrow(start: tuple, end: tuple, colour: str = LINE) -> None:
        style = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", end, start, arrowprops=style)

    rewards = "   ".join(f"{reward:.0f}" for reward in REWARDS)
    numbers = "  ".join(f"{float(value):+.1f}" for value in advantages).replace("-", "−")
    box((1, 14, 37, 46), "prompt $x$")
    box((20, 42, 37, 46), "policy $\\pi$ samples a\ngroup $y_1 … y_4$")
    box((48, 65, 37, 46), f"verifier, rewards\n{rewards}")
    box((71, 99, 37, 46), f"advantages $A$ in the group\n{numbers}")
    box((20, 42, 21, 30), "gradient step\nchanges the policy")
    box(
        (60, 99, 21, 30),
        "loss of a token: $-$ clipped ratio · $A$\n$+\\;\\beta$ · KL penalty to the anchor",
    )
    box((20, 52, 10, 17), "guide $q$ reads $\\pi$'s uncertainty", GUIDE)
    box((20, 52, 0, 7), f"reference {REF}, the SFT model")
    box((66, 99, 5, 12), f"anchor $q\\cdot${REF}  (GRPO: $q = 1$)", ANCHOR)
    arrow((14.3, 41.5), (19.6, 41.5))
    arrow((42.3, 41.5), (47.6, 41.5))
    arrow((65.3, 41.5), (70.6, 41.5))
    arrow((85, 36.7), (85, 30.5))
    arrow((59.7, 25.5), (42.5, 25.5))
    arrow((31, 30.3), (31, 36.5))
    arrow((52.3, 13.5), (65.6, 10), GUIDE)
    arrow((52.3, 3.5), (65.6, 7))
    arrow((85, 12.3), (85, 20.5), ANCHOR)
    figure.savefig(path, dpi=150)


def draw(folder: Path) -> None:
    """Both pictures, and the numbers of the first as a CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_guide(folder / "guide.png")
    draw_loop(folder / "loop.png")
