"""Guide, β, penalty, credit and teacher contradict each other in one place, with a remedy."""

import re
from types import SimpleNamespace

import pytest
import torch

from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.choices import UNDECIDED, check_choices
from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide


class Own:
    needs = frozenset()

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return torch.zeros_like(signals.mask, dtype=torch.float32)


class OwnCausal(Own):
    causal = True


class LooksAhead(Own):
    causal = False


EXACT = {"beta": 0.05, "kl_estimator": "k3-is", "credit": "sequence"}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"guide": BranchGuide(), "beta": 0.0}, r"beta must not be 0 with a guide.*beta=0"),
        ({"guide": None, "beta": 0.0, "kl_estimator": "k2"}, r"beta must not be 0 with kl_est"),
        ({"guide": None, "beta": 0.1, "kl_estimator": "k4"}, r"kl_estimator must be one of .*'k4'"),
        ({"guide": None, "beta": 0.1, "credit": "step"}, r"credit must be one of .*'step'"),
        ({"guide": None, "beta": 0.1, "credit": "sequence"}, r"kl_estimator must be one of .*'k3'"),
        ({"guide": None} | EXACT | {"beta": 0.0}, r"beta not 0, got .*beta=0.0"),
        ({"guide": TokenGuide()} | EXACT, r"reads no later token.*norm='minmax'.*norm='causal'"),
        ({"guide": AdaptiveGuide(TokenGuide(), 0.01)} | EXACT, r"reads no later token"),
        ({"guide": Own()} | EXACT, r"reads no later token.*causal = True"),
        ({"guide": LooksAhead()} | EXACT, r"reads no later token"),
        ({"guide": TeacherGuide(), "beta": 0.1, "teacher": None}, r"got none. Set teacher"),
        (
            {"guide": BranchGuide(), "beta": 0.1, "teacher": "t"},
            r"teacher='t' without such a",
        ),
        ({"guide": None, "beta": 0.1, "teacher": "t"}, r"teacher='t' without such a"),
    ],
)
def test_contradictions_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        check_choices(**choices)


TUPLE = SimpleNamespace(needs=("entropies",), log_guide=lambda signals, **words: None)


@pytest.mark.parametrize("guide", ["branch", object(), TUPLE])
def test_what_is_no_guide_is_refused(guide):
    needs = re.escape(repr(getattr(guide, "needs", None)))
    with pytest.raises(TypeError, match=f"a guide must have a method .* with `needs` {needs}"):
        check_choices(guide=guide, beta=0.1)


def test_a_class_is_refused():
    with pytest.raises(TypeError, match=r"must be an instance, got the class BranchGuide"):
        check_choices(guide=BranchGuide, beta=0.1)


@pytest.mark.parametrize(
    "choices",
    [
        {"guide": None, "beta": 0.0},
        {"guide": None, "beta": 0.0, "teacher": None},
        {"guide": Own(), "beta": 0.1},
        {"guide": TeacherGuide(), "beta": 0.1},
        {"guide": TeacherGuide(), "beta": 0.1, "teacher": UNDECIDED},
        {"guide": TeacherGuide(), "beta": 0.1, "teacher": "adapter"},
        *(
            {"guide": guide} | EXACT
            for guide in (
                None,
                BranchGuide(),
                RandomGuide(),
                TeacherGuide(),
                TokenGuide(norm="causal"),
                AdaptiveGuide(BranchGuide(), 0.01),
                AdaptiveGuide(TokenGuide(norm="causal"), 0.01),
                OwnCausal(),
            )
        ),
    ],
)
def test_what_goes_together_passes(choices):
    check_choices(**choices)
