"""Which guide, β, KL penalty, credit and teacher can be combined, checked in one place.

Called where these are chosen (an algorithm, a config, the options of a command) and again when
training begins, so that a contradiction is an error before data or models are loaded.
"""

from typing import Any, Final

from sage_unsloth.methods.penalties import PENALTIES, check_kl_estimator
from sage_unsloth.objective.choices import check_guide, check_teacher
from sage_unsloth.objective.protocols import CausalGuide, Guide
from sage_unsloth.patch.choice import Choice

CREDITS = ("token", "sequence")
REVERSE_KL_ESTIMATORS = ("k3-is", "k2")
"""Their expected gradient is the reverse KL's, which `credit="sequence"` completes."""
KL_PLACES = ("loss", "reward")
"""The KL to π_ref is a penalty in the loss at each token, or a part of the reward."""
UNDECIDED: Final = object()
"""For a teacher that is chosen later."""


def check_choices(
    *,
    guide: Guide | None,
    beta: float,
    kl_estimator: str = "k3",
    credit: str = "token",
    kl_in: str = "loss",
    teacher: Any = UNDECIDED,
) -> None:
    """Raises if the parts of an objective contradict each other.

    Args:
        kl_estimator: one of `penalties.KL_ESTIMATORS`.
        credit: one of `CREDITS`.
        kl_in: one of `KL_PLACES`.
        teacher: for a guide that needs "teacher_logps", or None; `UNDECIDED` skips this check.

    Raises:
        TypeError: `guide` is not a guide.
        ValueError: with the rule, the value and what to change.
    """
    if guide is not None:
        check_guide(guide, beta)
    check_places(credit, kl_in)
    _check_penalty(kl_estimator, beta)
    _check_credit(credit, kl_estimator, beta, guide)
    _check_kl_in(kl_in, kl_estimator, beta, guide, credit)
    if teacher is not UNDECIDED:
        check_teacher(guide, teacher)


def check_places(credit: str, kl_in: str) -> None:
    """Raises ValueError for an unknown credit or place of the KL."""
    if credit not in CREDITS:
        raise ValueError(f"credit must be one of {CREDITS}, got {credit!r}")
    if kl_in not in KL_PLACES:
        raise ValueError(f"kl_in must be one of {KL_PLACES}, got {kl_in!r}")


def _check_penalty(kl_estimator: str, beta: float) -> None:
    check_kl_estimator(kl_estimator)
    if kl_estimator in PENALTIES and beta == 0.0:
        raise ValueError(
            f"beta must not be 0 with kl_estimator={kl_estimator!r}, which chooses the KL penalty, "
            f"got beta={beta}. Set beta=0.05, or leave kl_estimator at 'k3'"
        )


def _check_credit(credit: str, kl_estimator: str, beta: float, guide: Guide | None) -> None:
    if credit == "token":
        return
    if kl_estimator not in REVERSE_KL_ESTIMATORS or beta == 0.0:
        raise ValueError(
            "credit='sequence' needs a reverse KL, so kl_estimator must be one of "
            f"{REVERSE_KL_ESTIMATORS} and beta not 0, got kl_estimator={kl_estimator!r} and "
            f"beta={beta}. Change these, or use credit='token'"
        )
    if guide is not None and not (isinstance(guide, CausalGuide) and guide.causal):
        raise ValueError(
            f"credit='sequence' needs a guide that reads no later token, got {guide!r} without "
            "causal=True. Set norm='causal' of a TokenGuide, give a causal guide of your own the "
            "attribute causal = True, or use credit='token'"
        )


def _check_kl_in(
    kl_in: str, kl_estimator: str, beta: float, guide: Guide | None, credit: str
) -> None:
    if kl_in == "loss":
        return
    if beta == 0.0:
        raise ValueError(
            "beta must not be 0 with kl_in='reward', which takes β times the KL from the reward, "
            f"got beta={beta}. Set beta=0.05, or leave kl_in at 'loss'"
        )
    if guide is not None or kl_estimator != "k3" or credit != "token":
        raise ValueError(
            "kl_in='reward' takes the KL out of the loss, where a guide, kl_estimator and "
            f"credit='sequence' act, got guide={guide!r:.100}, kl_estimator={kl_estimator!r} and "
            f"credit={credit!r}. Leave these out, or kl_in at 'loss'"
        )


def check_together(trainer: Any, choice: Choice) -> None:
    """`check_choices` for the methods that are open around a `guided_kl`."""
    check_choices(
        guide=choice.guide,
        beta=trainer.beta,
        kl_estimator=choice.method_record("kl_estimator", "k3").partition(",")[0],
        credit=choice.method_record("credit", "token"),
        kl_in=choice.method_record("kl_in", "loss"),
        teacher=choice.teacher,
    )
