"""The metrics of a guided step by hand, pooled over micro-batches of different sizes."""

import math
from collections import defaultdict

import pytest
import torch

from sage_unsloth.objective.guide_metrics import LOG_GUIDE_MAX, GuideMetrics
from sage_unsloth.objective.signals import TokenSignals

POLICY = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, math.nan]])
REF = torch.tensor([[-1.2, -1.0, -0.5], [-1.0, -0.3, math.inf]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOG_Q = torch.tensor([[0.3, -0.4, 0.0], [-0.1, 0.0, 0.0]])
ENTROPIES = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.5, 9.0]])


def k3(d):
    return math.exp(d) - d - 1


def add(metrics, logged, log_guide=LOG_Q, mask=MASK, policy=POLICY, ref=REF, credit=None):
    signals = TokenSignals(policy, ref, mask, entropies=ENTROPIES)
    log_guide = None if log_guide is None else torch.where(mask.bool(), log_guide, 0.0)
    further = {} if credit is None else {"credit_abs": credit.abs()}
    metrics.add(signals, log_guide, lambda values: values, logged, further)
    return {name: values[0] for name, values in logged.items()}


def test_values_by_hand():
    logged = add(GuideMetrics(), defaultdict(list), credit=torch.tensor([[1.0, -2, 0], [1, 0, 0]]))
    q = [math.exp(x) for x in (0.3, -0.4, 0.0, -0.1, 0.0)]
    rows = [[-0.2, 1.0, 0.0], [0.5, 0.0]]
    anchors = [[0.1, 0.6, 0.0], [0.4, 0.0]]
    expected = {
        "sage/guide_mean": sum(q) / 5,
        "sage/guide_min": min(q),
        "sage/guide_max": max(q),
        "sage/log_guide_mean": -0.2 / 5,
        "sage/share_touched": 3 / 5,  # q below 1 counts as much as above
        "sage/entropy": 4.0 / 5,
        "sage/credit_abs": 4.0 / 5,
        "kl/ref_k3": sum(sum(map(k3, row)) / len(row) for row in rows) / 2,
        "kl/anchor_k3": sum(sum(map(k3, row)) / len(row) for row in anchors) / 2,
    }
    assert logged == pytest.approx(expected, rel=1e-5)


def test_a_value_of_some_micro_batches_is_kept():
    """A shape function may add one only where it did something."""
    credit = torch.tensor([[1.0, -2, 0], [1, 0, 0]])
    for order in ((credit, None), (None, credit)):
        metrics, logged = GuideMetrics(), defaultdict(list)
        for value in order:
            last = add(metrics, logged, credit=value)
        assert last["sage/credit_abs"] == pytest.approx(4.0 / 10)


def test_a_guide_below_one_touches_its_tokens():
    logged = add(GuideMetrics(), defaultdict(list), log_guide=torch.full((2, 3), -0.2))
    assert logged["sage/share_touched"] == 1.0


def test_micro_batches_are_pooled_by_their_tokens():
    metrics, logged = GuideMetrics(), defaultdict(list)
    add(metrics, logged)
    one = add(metrics, logged, mask=torch.tensor([[1, 0, 0], [0, 0, 0]]))
    assert metrics.tokens == 6
    assert one["sage/log_guide_mean"] == pytest.approx((-0.2 + 0.3) / 6)
    assert one["sage/share_touched"] == pytest.approx((3 + 1) / 6)
    logged.clear()  # the trainer has logged: a new window begins
    assert add(metrics, logged)["sage/log_guide_mean"] == pytest.approx(-0.2 / 5)
    assert metrics.tokens == 5


def test_a_batch_without_a_token_is_counted_as_none():
    metrics = GuideMetrics()
    logged = add(metrics, defaultdict(list), mask=torch.zeros(2, 3, dtype=torch.int64))
    assert metrics.tokens == 0
    assert (logged["sage/guide_min"], logged["sage/guide_max"]) == (1.0, 1.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_range_of_log_q(sign):
    add(GuideMetrics(), defaultdict(list), log_guide=torch.full((2, 3), sign * LOG_GUIDE_MAX))
    beyond = torch.full((2, 3), sign * (LOG_GUIDE_MAX + 0.01))
    with pytest.raises(ValueError, match=r"at most 20 nats.*got q from"):
        add(GuideMetrics(), defaultdict(list), log_guide=beyond)


def test_without_a_guide_and_without_a_reference():
    logged = add(GuideMetrics(), defaultdict(list), log_guide=None)
    assert set(logged) == {"kl/ref_k3", "sage/entropy"}
    logged = add(GuideMetrics(), defaultdict(list), log_guide=None, ref=None)
    assert set(logged) == {"sage/entropy"}
