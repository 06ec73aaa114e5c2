"""The check of a loss passes what is right, and finds what is wrong and says which term."""

import pytest
import torch

from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch import unsloth_seam
from sage_unsloth.selftest import losses, policy
from sage_unsloth.selftest.findings import FAILED, PASSED
from sage_unsloth.selftest.losses import Step, distance, fit_coefficients, judge_step
from sage_unsloth.selftest.oracle import TERMS, Expected


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return policy.small_model(tmp_path_factory.mktemp("selftest") / "model")


@pytest.fixture
def check(unsloth_module, model_folder, tmp_path, monkeypatch):
    """The findings of one format, over a model that is made once."""
    monkeypatch.setattr(policy, "small_model", lambda folder: model_folder)

    def run(number_format="float32", ways=("eager",)):
        return list(losses.guided_loss(tmp_path, number_format, ways))

    return run


def test_float32_is_right_to_its_rounding(check):
    eager, shared = check(ways=("eager", "shared prefix"))
    for finding in (eager, shared):
        assert finding.status == PASSED, finding
        assert finding.figures["gradient_error"] < 2e-5
        assert finding.figures["coefficients"] == pytest.approx(dict.fromkeys(TERMS, 1), abs=1e-4)
        assert finding.figures["completion_tokens"] > 100
    # Another guide: the loss is another one.
    assert eager.figures["loss_expected"] != shared.figures["loss_expected"]


@pytest.mark.long
def test_4_bit_weights_are_compared_with_the_values_they_stand_for(check):
    (finding,) = check("4-bit")
    assert finding.status == PASSED, finding
    assert finding.figures["gradient_error"] < 5e-5
    # Quantised: the loss is not that of the weights before.
    (exact,) = check("float32")
    assert abs(finding.figures["loss_expected"] - exact.figures["loss_expected"]) > 1e-3


@pytest.mark.long
def test_bfloat16_is_allowed_its_own_rounding(check):
    (finding,) = check("bfloat16")
    assert finding.status == PASSED, finding
    assert 2.0**-8 < finding.figures["error_allowed"] < 0.3


@pytest.mark.long
def test_float16_is_scaled_and_allowed_its_own_rounding(check):
    """On a CPU by this package's own scaling; the first scales are too large, and are skipped."""
    (finding,) = check("float16")
    assert finding.status == PASSED, finding
    assert 2.0**-11 < finding.figures["error_allowed"] < 0.05


def test_a_wrong_sign_of_beta_is_found(check, monkeypatch):
    apply = unsloth_seam.UnslothHook.apply

    def negated(self, *arguments):
        before = list(arguments)
        before[8] = -before[8]
        return apply(self, *before)

    monkeypatch.setattr(unsloth_seam.UnslothHook, "apply", negated)
    (finding,) = check()
    assert finding.status == FAILED
    assert "the kl term is -1 times, the guide term is -1 times" in finding.found
    assert "selftest.json" in finding.remedy


def test_a_dropped_guide_is_found(check, monkeypatch):
    monkeypatch.setattr(
        BranchGuide, "log_guide", lambda self, signals, **_: torch.zeros_like(signals.policy_logps)
    )
    (finding,) = check()
    assert finding.status == FAILED
    coefficients = finding.figures["coefficients"]
    assert coefficients == pytest.approx({"advantage": 1, "kl": 1, "guide": 0}, abs=1e-4)
    assert "the guide term is" in finding.found and "the kl term" not in finding.found


def test_a_gradient_off_by_a_thousandth_is_found(check, monkeypatch):
    apply = unsloth_seam.UnslothHook.apply

    def scaled(self, *arguments):
        *before, _ = arguments  # the last: what Unsloth multiplies its gradient by
        return apply(self, *before, 1.001)

    monkeypatch.setattr(unsloth_seam.UnslothHook, "apply", scaled)
    (finding,) = check()
    assert finding.status == FAILED
    assert finding.figures["coefficients"] == pytest.approx(dict.fromkeys(TERMS, 1.001), abs=1e-4)


# --- the judgement, by hand ---


def _expected(advantage, kl, guide):
    gradients = {
        term: {"w": torch.tensor(values).double()}
        for term, values in zip(TERMS, (advantage, kl, guide), strict=True)
    }
    return Expected(1.0, gradients, torch.zeros(1, 1))


def test_the_distance_is_that_of_the_worst_weight():
    wanted = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0, 0.0])}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1.0, 0.3])}
    off = distance(found, 1.2, wanted, 1.0)
    assert off.gradient == pytest.approx(0.3) and off.loss == pytest.approx(0.2)
    assert distance({"a": found["a"]}, 1.0, wanted, 1.0).gradient == 1.0
    found["a"] = torch.tensor([float("nan"), 4.0])
    assert not distance(found, 1.0, wanted, 1.0).gradient < 1e9


def test_coefficients_by_hand():
    expected = _expected([1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0])
    step = {"w": torch.tensor([1.0, -2.0, 0.25, 0.1]).double()}
    found, movable = fit_coefficients(step, expected, allowed=0.01)
    assert found == pytest.approx({"advantage": 1, "kl": -1, "guide": 0.5})
    length = (1 + 4 + 0.25) ** 0.5  # of the whole gradient, of which 0.01 may be an error
    assert movable == pytest.approx(
        {"advantage": 0.01 * length, "kl": 0.01 * length / 2, "guide": 0.01 * length / 0.5}
    )


def test_a_nan_never_passes():
    expected = _expected([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    step = Step(
        {"completion_mask": torch.ones(1, 2)}, 1.0, {"w": torch.full((3,), torch.nan).double()}
    )
    assert judge_step(step, expected, expected, 1e-7)["status"] == FAILED
    step.gradients, step.loss = expected.total, float("nan")
    assert judge_step(step, expected, expected, 1e-7)["status"] == FAILED
    step.loss = 1.0
    assert judge_step(step, expected, expected, 1e-7)["status"] == PASSED
