"""Guides: values by hand, masks, schedules, noise, errors."""

import math
import re
from pathlib import Path

import pytest
import torch

from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.objective.surprisal import NORMS, normalised_surprisal

TIME = {"step": 0, "max_steps": 80}
QUIET = CosineSchedule(0.0, 0.0)
GUIDES = [
    BranchGuide(),
    TokenGuide(),
    TokenGuide(norm="rank"),
    TokenGuide(norm="zscore"),
    RandomGuide(),
]


def signals(surprisal, mask=None, entropies=None):
    logps = -torch.tensor(surprisal)
    mask = torch.ones_like(logps) if mask is None else torch.tensor(mask)
    entropies = torch.full_like(logps, 2.0) if entropies is None else torch.tensor(entropies)
    return TokenSignals(logps, logps - 0.1, mask, entropies)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.smoke
def test_branch_by_hand():
    s = signals([[1.0] * 5], entropies=[[0.0, 1.2, 2.2, 1.7, 9.0]])
    q = BranchGuide().log_guide(s, **TIME).exp()
    torch.testing.assert_close(q, torch.tensor([[1.0, 1.0, 1.3, 1.15, 1.4]]))


def test_branch_without_ratio_is_one_everywhere():
    assert BranchGuide(ratio=0).log_guide(signals([[0.1, 3.0]]), **TIME).tolist() == [[0.0, 0.0]]


@pytest.mark.smoke
def test_token_minmax_by_hand():
    # Surprisals 0..20: the 5 % and 95 % quantiles of 21 evenly spaced numbers are 1 and 19.
    s = signals([list(map(float, range(21)))])
    q = TokenGuide(alpha=CosineSchedule(0.3, 0.1), sigma=QUIET).log_guide(s, **TIME).exp()
    expected = [1 + 0.3 * (min(max(x, 1), 19) - 1) / 18 for x in range(21)]
    torch.testing.assert_close(q, torch.tensor([expected]))


@pytest.mark.smoke
def test_token_rank_and_zscore_by_hand():
    s = signals([[3.0, 1.0, 2.0, 10.0]])
    rank = normalised_surprisal(s.policy_logps, s.mask, "rank")
    torch.testing.assert_close(rank, torch.tensor([[2 / 3, 0.0, 1 / 3, 1.0]]))
    z = normalised_surprisal(s.policy_logps, s.mask, "zscore")
    deviation = math.sqrt(((3 - 4) ** 2 + (1 - 4) ** 2 + (2 - 4) ** 2 + (10 - 4) ** 2) / 4)
    expected = [1 / (1 + math.exp(-(x - 4) / deviation)) for x in (3, 1, 2, 10)]
    torch.testing.assert_close(z, torch.tensor([expected]))


def test_zscores_of_equal_surprisals_are_all_one_half():
    """The mean of equal float32 numbers can be off by a rounding, which is no deviation."""
    for length in (2, 7, 8, 30):
        for logp in (-0.1, -0.3, -0.7):
            logps = torch.full((1, length), logp)
            weight = normalised_surprisal(logps, torch.ones_like(logps), "zscore")
            assert (weight == 0.5).all()


def test_token_noise_scales_with_surprisal():
    s = signals([[0.0, 5.0, 10.0]])
    guide = TokenGuide(alpha=QUIET, sigma=CosineSchedule(0.1, 0.1, decay=1.0), norm="rank")
    xi = torch.randn((1, 3), generator=generator())
    q = guide.log_guide(s, generator=generator(), **TIME).exp()
    torch.testing.assert_close(q, 1 + 0.1 * torch.tensor([[0.0, 0.5, 1.0]]) * xi)


def test_random_touches_a_share_epsilon_with_mean_one():
    s = signals([[1.0] * 500] * 400)
    guide = RandomGuide(
        epsilon=CosineSchedule(0.25, 0.25, decay=1.0), sigma=CosineSchedule(0.1, 0.1, decay=1.0)
    )
    log_guide = guide.log_guide(s, generator=generator(), **TIME)
    touched = log_guide != 0
    assert touched.float().mean().item() == pytest.approx(0.25, abs=0.005)
    noise = log_guide.exp()[touched] - 1
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    assert noise.std().item() == pytest.approx(0.1, abs=0.002)


@pytest.mark.parametrize("guide", GUIDES, ids=repr)
class TestEveryGuide:
    def test_is_a_guide(self, guide):
        assert isinstance(guide, Guide)
        assert guide == type(guide)(**vars(guide))
        with pytest.raises(AttributeError):
            guide.q_min = 0.1

    def test_is_one_outside_the_mask_and_blind_to_what_stands_there(self, guide):
        clean = signals([[1.0, 2.0, 0.5, 3.0]], [[0, 1, 1, 0]])
        dirty = signals(
            [[math.inf, 2.0, 0.5, math.nan]], [[0, 1, 1, 0]], [[math.nan, 2.0, 2.0, math.inf]]
        )
        a = guide.log_guide(clean, generator=generator(), **TIME)
        b = guide.log_guide(dirty, generator=generator(), **TIME)
        assert torch.equal(a, b)
        assert a[0, 0] == a[0, 3] == 0
        assert a.dtype == torch.float32

    def test_rows_with_no_or_one_valid_token(self, guide):
        s = signals([[1.0, 2.0], [3.0, 4.0]], [[0, 0], [0, 1]])
        log_guide = guide.log_guide(s, generator=generator(), **TIME)
        assert log_guide.isfinite().all()
        assert log_guide[0].tolist() == [0.0, 0.0]

    def test_rows_do_not_see_each_other(self, guide):
        if isinstance(guide, RandomGuide):
            pytest.skip("draws fresh noise for each row")
        guide = type(guide)(
            **vars(guide) | ({"sigma": QUIET} if isinstance(guide, TokenGuide) else {})
        )
        a = guide.log_guide(signals([[1.0, 2.0, 5.0], [9.0, 1.0, 0.0]]), **TIME)
        b = guide.log_guide(signals([[1.0, 2.0, 5.0], [0.5, 7.0, 7.0]]), **TIME)
        assert torch.equal(a[0], b[0])

    def test_has_no_gradient_and_stays_within_the_clip(self, guide):
        surprisal = torch.rand((4, 64), generator=generator()) * 10
        s = TokenSignals(
            (-surprisal).requires_grad_(),
            -surprisal,
            torch.ones(4, 64),
            surprisal.clone().requires_grad_(),
        )
        log_guide = guide.log_guide(s, generator=generator(), **TIME)
        assert not log_guide.requires_grad
        q = log_guide.exp()
        assert 0.6 - 1e-6 <= q.min() <= q.max() <= 1.4 + 1e-6
        assert q.max() > q.min()

    def test_is_a_function_of_generator_and_step(self, guide):
        s = signals([[1.0, 2.0, 5.0, 0.2] * 32])
        again = [guide.log_guide(s, step=3, max_steps=80, generator=generator(5)) for _ in range(2)]
        assert torch.equal(*again)
        if not isinstance(guide, BranchGuide):
            assert not torch.equal(
                again[0], guide.log_guide(s, step=3, max_steps=80, generator=generator(6))
            )
            assert not torch.equal(
                again[0], guide.log_guide(s, step=4, max_steps=80, generator=generator(5))
            )

    @pytest.mark.gpu
    def test_is_the_same_on_a_gpu(self, guide):
        s = signals([[1.0, 2.0, 5.0, 0.2] * 32])
        there = TokenSignals(*(v.cuda() for v in vars(s).values()))
        a = guide.log_guide(s, generator=generator(), **TIME)
        b = guide.log_guide(there, generator=generator(), **TIME)
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_stay_in_zero_one_on_constant_rows(norm):
    weight = normalised_surprisal(-torch.full((2, 7), 1.1), torch.ones(2, 7), norm)
    assert ((weight >= 0) & (weight <= 1)).all()
    if norm != "rank":
        assert weight.unique().numel() == 1


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.3),
        (5, 0.1 + 0.2 / 2),
        (9, 0.1 + 0.2 * 0.5 * (1 + math.cos(0.9 * math.pi))),
        (10, 0.27),
        (25, 0.1 + (0.3 * 0.81 - 0.1) / 2),
        (70, 0.3 * 0.9**7),
        (80, 0.3 * 0.9**7),
    ],
)
def test_schedule_by_hand(step, expected):
    assert CosineSchedule(0.3, 0.1).value(step, 80) == pytest.approx(expected, abs=1e-12)


def test_schedule_shorter_than_its_periods():
    values = [CosineSchedule(0.3, 0.1).value(step, 3) for step in range(4)]
    assert values == pytest.approx([0.3, 0.27, 0.243, 0.2187])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BranchGuide(q_min=0.0), "q_min must be > 0 because log q is taken, got 0.0"),
        (lambda: BranchGuide(q_min=-0.1), "q_min must be > 0"),
        (lambda: TokenGuide(q_min=1.5, q_max=1.4), "q_max must be finite and >= q_min"),
        (lambda: RandomGuide(q_max=math.inf), "q_max must be finite"),
        (lambda: BranchGuide(threshold=-1), "threshold must be finite and >= 0"),
        (lambda: BranchGuide(ratio=math.nan), "ratio must be finite"),
        (lambda: TokenGuide(norm="max"), r"norm must be one of .*minmax"),
        (lambda: RandomGuide(epsilon=CosineSchedule(1.5, 0.0)), "epsilon must stay within"),
        (lambda: CosineSchedule(0.1, 0.3), "upper must be >= lower"),
        (lambda: CosineSchedule(0.3, -0.1), "lower must be >= 0"),
        (lambda: CosineSchedule(0.3, 0.1, periods=0), "periods must be >= 1"),
        (lambda: CosineSchedule(0.3, 0.1, decay=0.0), "decay must be in"),
        (lambda: CosineSchedule(0.3, 0.1).value(-1, 10), "step must be >= 0"),
        (lambda: CosineSchedule(0.3, 0.1).value(1, 0), "max_steps >= 1"),
        (
            lambda: TokenSignals(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4)),
            r"the same shape.*\(2, 4\)",
        ),
        (lambda: TokenSignals(torch.zeros(2), torch.zeros(2), torch.zeros(2)), r"\(B, T\)"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_branch_without_entropies_is_refused():
    s = signals([[1.0]])
    with pytest.raises(
        ValueError, match=r"BranchGuide needs the signal 'entropies', got entropies=None"
    ):
        BranchGuide().log_guide(TokenSignals(s.policy_logps, s.ref_logps, s.mask), **TIME)


def test_the_guide_of_the_page_works():
    page = (Path(__file__).parents[2] / "docs" / "guides.md").read_text()
    code = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Lift" in b)
    namespace = {}
    exec(code, namespace)
    guide = namespace["Lift"]()
    assert isinstance(guide, Guide)
    s = TokenSignals(
        torch.zeros(1, 3), torch.tensor([[-1.0, -4.0, -9.0]]), torch.tensor([[1, 1, 0]])
    )
    log_guide = guide.log_guide(s, **TIME)
    torch.testing.assert_close(log_guide, torch.tensor([[0.0, math.log(1.2), 0.0]]))
