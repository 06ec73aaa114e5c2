"""Log-probs, entropies and gradients of `scoring.py`: against plain torch in float64, and against
Unsloth's own scorers.
"""

import inspect
import sys
import types
from contextlib import ExitStack

import pytest
import torch
from conftest import pairs
from oracle import OLD

from sage_unsloth.objective.guides import BranchGuide, TokenGuide
from sage_unsloth.patch import guided as patch
from sage_unsloth.patch import one_pass, scoring
from sage_unsloth.patch.contract import check_unsloth
from sage_unsloth.patch.one_pass import OnePassScorers, one_pass_loss
from sage_unsloth.patch.scoring import logps_and_entropies
from sage_unsloth.trainers.trainer_names import SCORER_WITH_ENTROPY, SCORERS, ContractError

B, T, H, V = 3, 5, 8, 37
TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcapping": {"logit_softcapping": 2.0},
    "multiply": {"logit_scale_multiply": 0.5},
    "divide": {"logit_scale_divide": 3.0},
    "all": {
        "logit_scale_multiply": 2.5,
        "logit_scale_divide": 2.0,
        "logit_softcapping": 3.0,
        "temperature": 1.3,
    },
}


def problem(dtype=torch.float32, bias=False, vocabulary=V):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, H, generator=generator).to(dtype)
    head = torch.randn(vocabulary, H, generator=generator).to(dtype)
    index = torch.randint(vocabulary, (B, T), generator=generator)
    offset = torch.randn(vocabulary, generator=generator).to(dtype) if bias else None
    upstream = torch.randn(B, T, generator=generator)
    return hidden, head, index, offset, upstream


def plain_torch(
    hidden,
    head,
    index,
    bias,
    upstream,
    logit_scale_multiply=0.0,
    logit_scale_divide=0.0,
    logit_softcapping=0.0,
    temperature=1.0,
):
    hidden = hidden.double().requires_grad_()
    z = hidden @ head.double().T
    z = z if bias is None else z + bias.double()
    z = z * (logit_scale_multiply or 1) / (logit_scale_divide or 1)
    if logit_softcapping:
        z = logit_softcapping * torch.tanh(z / logit_softcapping)
    all_logps = (z / temperature).log_softmax(-1)
    logps = all_logps.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    entropies = -(all_logps.exp() * all_logps).sum(-1)
    (gradient,) = torch.autograd.grad((logps * upstream).sum(), hidden)
    return logps.detach(), entropies.detach(), gradient


def ours(hidden, head, index, bias, upstream, chunks=4, **transforms):
    hidden = hidden.clone().requires_grad_()
    logps, entropies = logps_and_entropies(
        hidden, head, index, chunks, **transforms, lm_head_bias=bias
    )
    assert logps.shape == entropies.shape == index.shape
    assert logps.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
    (logps * upstream).sum().backward()
    return logps.detach(), entropies, hidden.grad


def assert_near(found, expected, tolerance):
    for name, a, b in zip(("logps", "entropies", "gradient"), found, expected, strict=True):
        assert (a.double() - b).abs().max() <= tolerance * max(1, b.abs().max()), name


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
def test_values_and_gradients_equal_plain_torch(transforms, bias):
    case = problem(bias=bias)
    assert_near(ours(*case, **transforms), plain_torch(*case, **transforms), 2e-6)


@pytest.mark.parametrize("chunks", [1, 2, 7, 15, 400])
@pytest.mark.parametrize("rows", [1, 2, 4, 1000])
def test_no_result_depends_on_chunks_or_blocks(monkeypatch, chunks, rows):
    case = problem()
    expected, together, block = plain_torch(*case), [], scoring._block()
    monkeypatch.setattr(scoring, "BLOCK_NUMBERS", rows * V)
    monkeypatch.setattr(
        scoring, "_block", lambda: lambda part, *a: together.append(len(part)) or block(part, *a)
    )
    assert_near(ours(*case, chunks=chunks), expected, 2e-6)
    assert max(together) <= rows, "the memory of a block is bounded"


def test_an_empty_batch_is_an_empty_result():
    hidden, head, index, _, _ = problem()
    logps, entropies = logps_and_entropies(hidden[:, :0], head, index[:, :0], 4)
    assert logps.shape == entropies.shape == (B, 0)


def test_a_tokens_gradient_is_its_own(monkeypatch):
    """What arrives for one token moves the hidden state of no other one."""
    hidden, head, index, _, _ = problem()
    upstream = torch.zeros(B, T)
    upstream[1, 2] = 1.0
    _, _, gradient = ours(hidden, head, index, None, upstream)
    assert gradient[1, 2].abs().min() > 0
    gradient[1, 2] = 0
    assert not gradient.any()


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("how", ["float32", "bfloat16", "float16", "autocast"])
def test_it_is_unsloths_own_scorer(unsloth_module, transforms, how):
    """The same log-probs to the last bit as the scorer of the reference, so that the first KL is 0;
    the same gradient.
    """
    from unsloth_zoo import rl_replacements as theirs

    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    hidden, head, index, bias, upstream = problem(dtype, bias=True)
    arguments = (
        index,
        4,
        *(
            transforms.get(name, default)
            for name, default in (
                ("logit_scale_multiply", 0.0),
                ("logit_scale_divide", 0.0),
                ("logit_softcapping", 0.0),
                ("temperature", 1.0),
            )
        ),
    )
    tolerance = {"float32": 1e-5, "float16": 4e-3}.get(how, 3e-2)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        x, y = (hidden.clone().requires_grad_() for _ in range(2))
        found, entropies = logps_and_entropies(x, head, *arguments, lm_head_bias=bias)
        expected = theirs.chunked_hidden_states_selective_log_softmax(
            y, head, *arguments, lm_head_bias=bias
        )
        _, expected_entropies = theirs.chunked_hidden_states_selective_log_softmax_recompute(
            hidden, head, *arguments, lm_head_bias=bias, return_entropy=True
        )
    if OLD:
        assert torch.equal(found, expected)
        assert (entropies - expected_entropies).abs().max() <= 1e-5
    else:
        assert (found - expected).abs().max() <= 10 * tolerance
    for loss in (found, expected):
        (loss * upstream).sum().backward()
    assert x.grad.dtype == y.grad.dtype
    assert (x.grad - y.grad).abs().max() <= tolerance * y.grad.abs().max()


def test_float16_keeps_probabilities_that_it_cannot_hold():
    """20,000 tokens of 3e-8 each: all of the gradient's first component, and 0 in float16."""
    head = torch.tensor([[0.0, 17.3], *[[1.0, -1.0]] * 20_000]).half()
    hidden, index = torch.ones(1, 1, 2).half(), torch.zeros(1, 1, dtype=torch.long)
    _, _, expected = plain_torch(hidden, head, index, None, torch.ones(1, 1))
    _, _, gradient = ours(hidden, head, index, None, torch.ones(1, 1))
    assert expected[0, 0, 0] < -5e-4
    assert gradient[0, 0, 0].item() == pytest.approx(expected[0, 0, 0].item(), rel=5e-3)


def test_a_near_certain_token_has_a_right_entropy():
    """H = 1e-4 beside logits of 300, where logsumexp − Σ p z would be off by 1e-5 and more."""
    head = torch.zeros(100, 2)
    head[0, 0], head[:, 1] = 13.0, 300.0
    hidden, index = torch.ones(1, 1, 2), torch.zeros(1, 1, dtype=torch.long)
    case = (hidden, head, index, None, torch.ones(1, 1))
    _, expected, _ = plain_torch(*case)
    _, found, _ = ours(*case)
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)


def test_nothing_as_wide_as_the_vocabulary_is_kept():
    kept = []
    hidden, head, index, _, _ = problem(vocabulary=1000)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        logps, _ = logps_and_entropies(hidden.requires_grad_(), head, index)
    assert kept == [B * T * H]
    logps.sum().backward()


def test_without_gradients_none_is_computed_and_the_values_are_the_same(monkeypatch):
    hidden, head, index, _, _ = problem()
    with_gradient = logps_and_entropies(hidden.clone().requires_grad_(), head, index)
    head.requires_grad_()
    kept, original = [], scoring._score
    monkeypatch.setattr(scoring, "_score", lambda *a: kept.append(a[-1]) or original(*a))
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        found = logps_and_entropies(hidden.requires_grad_(), head, index)
    assert kept == [False] and not found[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(found, with_gradient, strict=True))


# --- where it is used ---


def scorer(trainer=None, name=SCORER_WITH_ENTROPY):
    return OnePassScorers(trainer or with_settings()).by_name[name]


def with_settings(**settings):
    return types.SimpleNamespace(args=types.SimpleNamespace(**settings))


def call(score, **changes):
    hidden, head, index, bias, _ = problem(bias=True)
    arguments = dict(lm_head=head, lm_head_bias=bias, return_entropy=True) | changes
    return score(hidden, arguments.pop("lm_head"), index, 4, 0.0, 0.0, 0.0, 1.0, **arguments)


@pytest.fixture
def calls(monkeypatch):
    """The number of chunks of each call of the one-pass scorer."""
    chunks = []
    monkeypatch.setattr(
        one_pass,
        "logps_and_entropies",
        lambda *a, **k: chunks.append(a[3]) or logps_and_entropies(*a, **k),
    )
    return chunks


def bfloat16_head():
    return {"lm_head": problem(torch.bfloat16)[1], "lm_head_bias": None}


def trained(name):
    _, head, _, bias, _ = problem(bias=True)
    return {name: {"lm_head": head, "lm_head_bias": bias}[name].requires_grad_()}


HOLDS = {
    "": ({}, {}),
    "mask by entropy": ({"top_entropy_quantile": 0.5}, {}),
    "an adaptive bonus, which Unsloth leaves out": (
        {"entropy_coef": 0.1, "use_adaptive_entropy": True},
        {},
    ),
    "log-probs alone": ({"entropy_coef": 0.1}, {"return_entropy": False}),
}
HOLDS_NOT = {
    "the output head is trained": ({}, trained("lm_head")),
    "the output head is trained, its bias": ({}, trained("lm_head_bias")),
    "entropy_coef needs": ({"entropy_coef": 0.1}, {}),
    "a float32 copy": ({}, {"fp32_lm_head": True}),
    "options that ours does not have": ({}, {"support_top_k": 3}),
}


@pytest.mark.parametrize(("settings", "changes"), HOLDS.values(), ids=HOLDS)
@pytest.mark.parametrize("name", SCORERS)
def test_it_is_used_where_it_holds(unsloth_module, calls, caplog, name, settings, changes):
    if name == SCORERS[1] and OLD:
        pytest.skip("2026.10.7 has no such scorer")
    score = scorer(with_settings(**settings), name)
    theirs = getattr(sys.modules["unsloth_zoo.rl_replacements"], name)
    assert inspect.signature(score) == inspect.signature(theirs), "Unsloth's loss reads it"
    with caplog.at_level("INFO"):
        found = call(score, **changes)
    assert calls == [4] and "in one pass over the logits" in caplog.text
    assert isinstance(found, tuple) == changes.get("return_entropy", True)


@pytest.mark.parametrize("reason", HOLDS_NOT)
def test_unsloths_own_scorer_stays_where_it_does_not_hold(
    unsloth_module, calls, caplog, monkeypatch, reason
):
    settings, changes = HOLDS_NOT[reason]
    zoo = sys.modules["unsloth_zoo.rl_replacements"]
    original = getattr(zoo, SCORER_WITH_ENTROPY)

    def theirs(*args, **kwargs):
        return "theirs"

    theirs.__signature__ = inspect.signature(original)
    monkeypatch.setattr(zoo, SCORER_WITH_ENTROPY, theirs)
    score = scorer(with_settings(**settings))
    with caplog.at_level("INFO"):
        assert call(score, **changes) == call(score, **changes) == "theirs"
    assert caplog.text.count("by Unsloth's own function: ") == 1, "said once"
    assert reason.split(",")[0] in caplog.text and calls == []
    if "trained" in reason:
        with torch.no_grad():
            assert isinstance(call(score, **changes), tuple)


def test_a_trainable_head_is_refused():
    hidden, head, index, _, _ = problem()
    with pytest.raises(ValueError, match=r"the output head must be frozen"):
        logps_and_entropies(hidden, head.requires_grad_(), index)


def test_in_16_bits_policy_and_reference_have_one_scorer(unsloth_module, calls):
    """Where Unsloth scores the reference by a kernel of its own, which rounds otherwise."""
    call(scorer(), **bfloat16_head())
    assert len(calls) == OLD


def test_unsloths_largest_chunk_is_kept(unsloth_module, calls):
    call(scorer(), max_rows_per_chunk=2)
    assert calls == [8], "15 rows, two at a time"


@pytest.mark.parametrize(
    ("guide", "loss_type"),
    pairs(
        {"none": None, "branch": BranchGuide(threshold=1.0), "token": TokenGuide()},
        {"grpo": "grpo", "dapo": "dapo"},
    ),
)
def test_the_loss_is_what_unsloths_scorer_makes_it(make_trainer, calls, guide, loss_type):
    """Plain, and within `guided_kl`, from inside and from outside."""
    found = []
    for contexts in ((), (one_pass_loss,), (one_pass_loss, guided), (guided, one_pass_loss)):
        trainer = make_trainer(max_steps=2, temperature=0.8, learning_rate=0.0, loss_type=loss_type)
        if guide is not None and guided not in contexts:
            contexts = (*contexts, guided)
        calls.clear()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(trainer, *[guide] * (context is guided)))
            trainer.train()
        rows = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([(row["loss"], row["grad_norm"], row["kl"]) for row in rows])
        with_entropies = guide is not None and "entropies" in guide.needs
        expected = 2 * 2 if one_pass_loss in contexts or with_entropies else 0
        assert len(calls) == expected, "2 steps of 2 micro-batches each"
        assert "compute_loss" not in vars(trainer)
    for other in found[1:]:
        for row, expected in zip(other, found[0], strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-7)


def guided(trainer, guide):
    return patch.guided_kl(trainer, guide)


def test_one_pass_without_an_effect_is_said(make_trainer, caplog):
    from unsloth.models import rl

    trainer = make_trainer(max_steps=1)
    setattr(trainer.model.get_base_model(), rl._UNSLOTH_GRPO_HIDDEN_STATES_UNSAFE_ATTR, True)
    with one_pass_loss(trainer):
        trainer.train()
    assert "one_pass_loss had no effect" in caplog.text


def test_one_pass_is_for_unsloths_trainer(unsloth_module):
    with pytest.raises(ContractError, match="Unsloth's generated GRPOTrainer"):
        one_pass_loss(object()).__enter__()


@pytest.mark.parametrize("drift", ["gone", "renamed", "an option less"])
def test_another_scorer_of_unsloths_is_refused(unsloth_module, monkeypatch, drift):
    name = "chunked_hidden_states_selective_log_softmax_recompute"
    zoo = sys.modules["unsloth_zoo.rl_replacements"]
    if drift == "gone":
        monkeypatch.delattr(zoo, name)
    else:
        original = inspect.signature(getattr(zoo, name)).parameters
        if drift == "renamed":
            kept = [p.replace(name="ids") if n == "index" else p for n, p in original.items()]
        else:
            kept = [p for n, p in original.items() if n != "max_rows_per_chunk"]

        def other(*_, **__):
            return None

        other.__signature__ = inspect.Signature(kept)
        monkeypatch.setattr(zoo, name, other)
    with pytest.raises(ContractError, match=r"_recompute must have these parameters"):
        check_unsloth(unsloth_module)
