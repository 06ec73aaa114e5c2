"""The algorithms of the paper's tables, and those its comparisons lack, as rows of settings.

    algorithm = get_algorithm("sage-branch")
    rlvr(algorithm.configure(RlvrConfig()), model, rows, folder, algorithm.guide, algorithm.name)

A row of your own is another `Algorithm`: `replace(ALGORITHMS["sage-branch"], name="mine",
guide=BranchGuide(ratio=0.5))`.
"""

import difflib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sage_unsloth.figures import COLUMNS
from sage_unsloth.objective.adaptive import AdaptiveGuide
from sage_unsloth.objective.choices import UNDECIDED, check_choices
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.loss import LOSS_TYPES
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.teacher_guide import TeacherGuide
from sage_unsloth.training.rlvr_config import RlvrConfig

SETTINGS = ("loss_type", "scale_rewards", "epsilon_high", "beta", "kl_estimator", "credit")
"""The fields of an algorithm that are settings of `RlvrConfig`; its guide is the other choice."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What one algorithm sets; everything else of a run (data, seeds, sampling, learning rate) is
    the run's own.

    Attributes:
        name: as given to `--algorithm`.
        description: one line: which gradient it has, or what a comparison with it isolates.
        paper_row: its row in the paper's tables; None where they have none.
        loss_type: how token losses are reduced.
        scale_rewards: what advantages are divided by ("group": the standard deviation of the
            prompt's rewards; "none").
        epsilon_high: upper clip of the importance ratio.
        beta: KL coefficient β; 0 drops the KL term.
        kl_estimator: the KL penalty, one of `sage_unsloth.objective.kl.KL_ESTIMATORS`.
        credit: "token", the paper's loss, or "sequence", the gradient of Eq. 6
            (`sage_unsloth.objective.credit.sequence_credit`).
        guide: shapes the KL anchor; None is q = 1.

    Raises:
        ValueError: an unknown loss type, estimator or credit, or a guide, penalty or credit of ours
            without its KL term.
        TypeError: `guide` is not a guide.
    """

    name: str
    description: str
    paper_row: str | None = None
    loss_type: str = RlvrConfig.loss_type
    scale_rewards: str = RlvrConfig.scale_rewards
    epsilon_high: float = RlvrConfig.epsilon_high
    beta: float = RlvrConfig.beta
    kl_estimator: str = RlvrConfig.kl_estimator
    credit: str = RlvrConfig.credit
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {LOSS_TYPES}; got {self.loss_type!r}")
        self._check_choices()

    def _check_choices(self, teacher: Any = UNDECIDED) -> None:
        check_choices(
            guide=self.guide,
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            credit=self.credit,
            teacher=teacher,
        )

    def with_settings(self, settings: Mapping[str, Any]) -> "Algorithm":
        """This algorithm under settings of a run, judged before data, plan or model are loaded.

        Args:
            settings: fields of `RlvrConfig`. Those in `SETTINGS` take the place of the algorithm's
                own, `teacher` must suit its guide, and all others are the run's affair.

        Raises:
            ValueError: they contradict each other, the guide, or the teacher.
        """
        own = {name: value for name, value in settings.items() if name in SETTINGS}
        changed = replace(self, **own)
        changed._check_choices(teacher=settings.get("teacher") or None)
        return changed

    def configure(self, config: RlvrConfig) -> RlvrConfig:
        """`config` with this algorithm's settings; the guide is passed to `rlvr` beside it."""
        return replace(config, **{name: getattr(self, name) for name in SETTINGS})


_EXACT: dict[str, Any] = {
    # r − mean(r) as it is, and a constant in the place of lengths: what is left is the gradient of
    # Eq. 6 up to that constant.
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "kl_estimator": "k3-is",
    "credit": "sequence",
}
_DAPO = (
    "clip and normalisation of DAPO (not its dynamic sampling, overlong filtering or overlong "
    "shaping)"
)

ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name="grpo",
            paper_row="GRPO",
            description="k3 as a loss: in expectation the forward KL's gradient, though k3's value "
            "is the reverse KL's",
        ),
        Algorithm(
            name="grpo-no-kl",
            paper_row="GRPO w/o KL",
            beta=0.0,
            description="no KL term: against it, what the penalty does at all",
        ),
        Algorithm(
            name="grpo-forward-kl",
            paper_row="GRPO + forward KL, if this is what it was",
            kl_estimator="forward-kl",
            description="importance-weighted cross-entropy −sg[ρ]·log π: the forward KL's "
            "gradient, so grpo's in expectation",
        ),
        Algorithm(
            name="grpo-forward-kl-naive",
            paper_row="GRPO + forward KL, if this is what it was",
            kl_estimator="forward-kl-naive",
            description="ρ log ρ − (ρ − 1) differentiated, as a direct implementation has it: "
            "neither KL's gradient",
        ),
        Algorithm(
            name="grpo-reverse-kl",
            kl_estimator="k3-is",
            description="k3 with the importance ratio inside: the reverse KL's gradient per token, "
            "with the states held fixed",
        ),
        Algorithm(
            name="sage-random",
            paper_row="GRPO + Random",
            guide=RandomGuide(),
            description="q is noise of mean 1 whatever the token: grpo plus noise, a noise floor",
        ),
        Algorithm(
            name="sage-token",
            paper_row="GRPO + Token",
            guide=TokenGuide(),
            description="q depends on the token itself, as in no other row of the paper: the "
            "forward KL's gradient to a reshaped anchor",
        ),
        Algorithm(
            name="sage-branch",
            paper_row="GRPO + Branch",
            guide=BranchGuide(),
            description="q depends on the prefix alone: grpo's pull to π_ref, 1 to 1.4 times as "
            "strong where entropy is high",
        ),
        Algorithm(
            name="sage-branch-reference",
            guide=BranchGuide(source="reference"),
            description="sage-branch by the reference's entropies: q·π_ref is one fixed anchor for "
            "the whole run, as the theory assumes",
        ),
        Algorithm(
            name="sage-branch-adaptive",
            guide=AdaptiveGuide(BranchGuide(), target=0.01),
            description="sage-branch, its strength steered to a mean log q of 0.01 nats a token, "
            "as long as any token is touched",
        ),
        Algorithm(
            name="sage-token-causal",
            guide=TokenGuide(norm="causal"),
            description="sage-token without a look at later tokens, so that q is the product of "
            "Eq. 7",
        ),
        Algorithm(
            name="sage-teacher",
            guide=TeacherGuide(),
            description="q is a frozen teacher's probability over the reference's: the anchor "
            "leans to the teacher (needs teacher=…)",
        ),
        Algorithm(
            name="grpo-exact",
            **_EXACT,
            description="the gradient of Eq. 1, KL of whole completions: against it, what the "
            "guide of the exact rows does",
        ),
        Algorithm(
            name="sage-branch-exact",
            **_EXACT,
            guide=BranchGuide(source="reference"),
            description="the gradient of Eq. 6: tokens are paid for the branch points that they "
            "lead to; its optimum is Eq. 4 (of q per token)",
        ),
        Algorithm(
            name="sage-token-exact",
            **_EXACT,
            guide=TokenGuide(norm="causal", source="reference"),
            description="the gradient of Eq. 6 with a causal token guide of the reference's "
            "surprisal",
        ),
        Algorithm(
            name="bnpo",
            loss_type="bnpo",
            description="normalised by the number of tokens; without it the guide's effect in "
            "bnpo-sage-branch is not isolated",
        ),
        Algorithm(
            name="bnpo-no-kl",
            paper_row="BNPO",
            loss_type="bnpo",
            beta=0.0,
            description="bnpo without the KL term, as the paper runs it",
        ),
        Algorithm(
            name="bnpo-sage-branch",
            paper_row="BNPO + Branch",
            loss_type="bnpo",
            guide=BranchGuide(),
            description="against bnpo the guide's effect; against bnpo-no-kl that of guide and KL "
            "together",
        ),
        Algorithm(
            name="dapo",
            loss_type="dapo",
            epsilon_high=0.28,
            description=f"{_DAPO}, with KL: without it the guide's effect in dapo-sage-branch is "
            "not isolated",
        ),
        Algorithm(
            name="dapo-no-kl",
            paper_row="DAPO",
            loss_type="dapo",
            epsilon_high=0.28,
            beta=0.0,
            description=f"{_DAPO}, without KL, as the paper runs it",
        ),
        Algorithm(
            name="dapo-sage-branch",
            paper_row="DAPO + Branch",
            loss_type="dapo",
            epsilon_high=0.28,
            guide=BranchGuide(),
            description=f"{_DAPO}; against dapo the guide's effect, against dapo-no-kl that of "
            "guide and KL together",
        ),
    )
}


def get_algorithm(name: str) -> Algorithm:
    """The row of `ALGORITHMS` of that name.

    Raises:
        ValueError: there is none; with the names, the nearest first.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), ALGORITHMS, n=1, cutoff=0.5)
    raise ValueError(
        f"an algorithm must be one of {', '.join(ALGORITHMS)}; got {name!r}"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def changes(algorithm: Algorithm, base: Algorithm = ALGORITHMS["grpo"]) -> dict[str, Any]:
    """The settings and the guide in which `algorithm` differs from `base`, with its values."""
    return {
        name: getattr(algorithm, name)
        for name in (*SETTINGS, "guide")
        if getattr(algorithm, name) != getattr(base, name)
    }


def listing() -> str:
    """Every algorithm on two lines: what it changes against grpo, and which gradient that is."""
    width = 2 + max(len(name) for name in ALGORITHMS)
    return "\n".join(
        textwrap.fill(
            text, COLUMNS, initial_indent=f"{start:{width}}", subsequent_indent=" " * width
        )
        for name, algorithm in ALGORITHMS.items()
        for start, text in ((name, _changes_text(algorithm)), ("", algorithm.description))
    )


def markdown_table() -> str:
    """All algorithms as a Markdown table."""
    what = "which gradient, or what it isolates"
    rows = [
        ("algorithm", "changes against grpo", what, "row of the paper"),
        ("---",) * 4,
        *(
            (f"`{name}`", _changes_text(row), row.description, row.paper_row or "none")
            for name, row in ALGORITHMS.items()
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _changes_text(algorithm: Algorithm) -> str:
    changed = changes(algorithm)
    if "guide" in changed:
        changed["guide"] = _guide_text(algorithm.guide)
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "nothing"


def _guide_text(guide: Any) -> str:
    """A dataclass guide's class and the fields that differ from the class's defaults."""
    given = [
        f"{field.name}={_guide_text(value) if isinstance(value, Guide) else repr(value)}"
        for field in fields(guide)
        if field.init and (value := getattr(guide, field.name)) != field.default
    ]
    return type(guide).__name__ + (f"({', '.join(given)})" if given else "")
