"""What a guide can do, by hand and by the optimum of two ways."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sage_unsloth.objective.guide_dose import GuideDose, compute_dose, dose_text

LOG_GUIDE = torch.log(
    torch.tensor([[1.0, 1.4, 1.4, 1.0], [1.0, 1.0, 1.2, 1.0], [1.4, 1.0, 1.0, 1.0]])
)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])


def test_the_dose_by_hand():
    """Nine tokens, four touched; problem "a" has the rewards 1, 1 and problem "b" 0 beside 1."""
    dose = compute_dose(LOG_GUIDE, MASK, [True, True, False], [1, 1, 0], ["a", "b", "b"])
    assert dose.touched == 4 / 9
    assert dose.guide_mean == pytest.approx((3 * 1.4 + 1.2 + 5) / 9)
    assert dose.correct == pytest.approx((2 * math.log(1.4) + math.log(1.2)) / 2)
    assert dose.wrong == pytest.approx(math.log(1.4))
    assert dose.spread == pytest.approx(2 * math.log(1.4) - math.log(1.2))
    assert dose.sigma == pytest.approx(math.sqrt(0.5)), "of 0 and 1 with n − 1"
    assert dose.payment(0.4) == pytest.approx(0.4 * dose.sigma * dose.spread)
    needed = dose.needed_beta(0.3)
    assert needed is not None and dose.payment(needed) == pytest.approx(0.3)
    assert dose.needed_spread(0.4, 0.3) * 0.4 * dose.sigma == pytest.approx(0.3)


def test_tokens_outside_the_mask_do_not_count():
    longer = torch.nn.functional.pad(LOG_GUIDE, (0, 3))
    mask = torch.nn.functional.pad(MASK, (0, 3))
    given = [True, True, False], [1, 1, 0], ["a", "b", "b"]
    assert compute_dose(longer, mask, *given) == compute_dose(LOG_GUIDE, MASK, *given)
    with pytest.raises(ValueError, match="at least one completion token"):
        compute_dose(LOG_GUIDE, torch.zeros(3, 4), *given)


@pytest.mark.parametrize(
    ("scale_rewards", "sigma"),
    [("none", 1.0), ("batch", np.std([1, 1, 0], ddof=1)), ("group", math.sqrt(0.5))],
)
def test_sigma_is_what_the_trainer_divides_by(scale_rewards, sigma):
    dose = compute_dose(
        LOG_GUIDE, MASK, [True, True, False], [1, 1, 0], ["a", "b", "b"], scale_rewards
    )
    assert dose.sigma == pytest.approx(sigma)


def test_all_completions_are_compared_where_fewer_than_two_are_correct():
    dose = compute_dose(LOG_GUIDE, MASK, [False] * 3, [0] * 3, ["a"] * 3)
    assert dose.correct is None and dose.sigma == 1.0
    assert dose.spread == pytest.approx(2 * math.log(1.4) - math.log(1.2))


def test_at_the_needed_beta_the_optimum_keeps_the_other_way():
    """Two ways, of which the rare one earns `gap` less and is paid Δ more: in π* ∝ q π_ref e^{r/β}
    their odds are what they are in π_ref exactly at the needed β, and lower below it.
    """
    dose = GuideDose(0.1, 1.04, 1.0, 0.5, spread=1.3, sigma=1.0)
    reference, gap = np.array([0.9, 0.1]), 0.5
    reward, sums = np.array([gap, 0.0]), np.array([0.0, dose.spread])
    needed = dose.needed_beta(gap)
    assert needed is not None
    for beta, compare in ((needed, 0), (needed / 2, -1), (needed * 2, 1)):
        optimum = reference * np.exp(sums + reward / beta)
        odds = math.log(optimum[1] / optimum[0]) - math.log(reference[1] / reference[0])
        assert np.sign(round(odds, 9)) == compare


@pytest.mark.parametrize(
    ("beta", "credit", "wrong", "says"),
    [
        (0.05, "sequence", 0.1, "At β 0.05 this guide cannot change which solutions survive"),
        (0.05, "sequence", 0.1, "It would need β 0.77, or Σ log q that differs by 20 nats"),
        (1.0, "sequence", 0.1, "At β 1 this guide can change which solutions survive"),
        (1.0, "sequence", 2.0, "It favours wrong completions over correct ones."),
        (0.05, "sequence", 2.0, "It favours wrong completions over correct ones."),
        (0.05, "token", 0.1, "acts like β 0.052 instead of 0.05"),
        (0.05, "token", 0.1, "With credit='sequence' it would need β 0.77"),
    ],
)
def test_the_sentence(beta, credit, wrong, says):
    dose = GuideDose(0.024, 1.04, 0.3, wrong, spread=1.3, sigma=0.5)
    assert says in dose_text(dose, beta, credit)
    assert "2.4 % of the tokens" in dose_text(dose, beta, credit)
    assert "changes 100 % of the" in dose_text(replace(dose, touched=1.0), beta, credit)
    worth = f"at most {dose.payment(beta):.2g} of a reward"
    assert (worth in dose_text(dose, beta, credit)) is (credit == "sequence")


@pytest.mark.parametrize(
    ("credit", "on_prefix", "comparable", "known"),
    [
        ("token", False, True, False),  # TokenGuide: q depends on the token itself
        ("sequence", False, True, True),
        ("sequence", True, False, False),  # RandomGuide, or other advantages than GRPO's
        ("token", True, True, True),
    ],
)
def test_nothing_is_said_of_what_is_not_known(credit, on_prefix, comparable, known):
    dose = GuideDose(0.024, 1.04, 0.3, 0.1, spread=1.3, sigma=0.5)
    text = dose_text(dose, 0.05, credit, on_prefix=on_prefix, comparable=comparable)
    assert ("cannot change which solutions survive" in text) is known
    assert ("is not known" in text) is not known


def test_a_guide_that_touches_nothing_is_said_to_be_off():
    dose = GuideDose(0.0, 1.0, 0.0, 0.0, spread=0.0, sigma=0.5)
    assert dose.needed_beta() is None
    assert "touches no token" in dose_text(dose, 0.05, "token")
