"""Every KL penalty inside Unsloth's own trainer, against the plain-torch loss: values, gradients,
the logged kl, refusals.
"""

import importlib.metadata

import pytest
import torch
from oracle import to_completion_layout, train_and_check

from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.own_penalty import make_kernel
from sage_unsloth.methods.penalties import KL_ESTIMATORS, NAIVE_KNEE, PENALTIES, SLOPE_MAX
from sage_unsloth.objective.guides import BranchGuide, TokenGuide
from sage_unsloth.objective.kl import UNSLOTH_K3_MAX
from sage_unsloth.objective.loss import LOSS_TYPES, grpo_loss
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.trainers import trainer_names

pytestmark = pytest.mark.usefixtures("unsloth_module")

GUIDES = {"none": None, "branch": BranchGuide(threshold=1.0), "token": TokenGuide()}


@pytest.fixture(autouse=True)
def eager():
    """Unsloth compiles its loss even where compilation is off, seconds for each of these tests;
    test_compiled.py has that.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def estimator_trainer(make_trainer, kl_estimator, **settings):
    return make_trainer(use_bias_correction_kl=kl_estimator == "k3-is", **settings)


REDUCTIONS = [("grpo", 1), ("grpo", 2), ("bnpo", 2), ("dr_grpo", 2), ("dapo", 1), ("dapo", 2)]
CASES = {
    f"{kl_estimator}-{loss_type}-{accumulation}-{list(GUIDES)[(row + column) % len(GUIDES)]}": (
        kl_estimator,
        loss_type,
        accumulation,
        list(GUIDES.values())[(row + column) % len(GUIDES)],
    )
    for row, kl_estimator in enumerate(["k3-is", *PENALTIES])
    for column, (loss_type, accumulation) in enumerate(REDUCTIONS)
}
"""Every penalty with every reduction and guide; `test_trl_parity.py` has the whole product."""


@pytest.mark.parametrize(
    ("kl_estimator", "loss_type", "accumulation", "guide"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.long] * ((i + i // 6) % 2))
        for i, (name, case) in enumerate(CASES.items())
    ],
)
def test_loss_gradients_and_kl_equal_the_oracle(
    make_trainer, kl_estimator, loss_type, accumulation, guide
):
    trainer = estimator_trainer(
        make_trainer,
        kl_estimator,
        loss_type=loss_type,
        max_steps=2,
        gradient_accumulation_steps=accumulation,
        mask_truncated_completions=False,
    )
    oracle = train_and_check(trainer, guide, kl_estimator=kl_estimator)
    entries = [entry for entry in trainer.state.log_history if "kl" in entry]
    assert len(entries) == len(oracle.steps) == 2
    for entry, step in zip(entries, oracle.steps, strict=True):
        assert len(step["inputs"]) == accumulation
        assert entry["kl"] == pytest.approx(step["expected_kl"], rel=1e-4, abs=1e-6)
        assert abs(entry["kl"]) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2, "max_steps": 4, "loss_type": "dapo"},
        {"importance_sampling_level": "sequence", "num_iterations": 2},
        {"mask_truncated_completions": True},
        {"temperature": 0.7},
    ],
    ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()),
)
@pytest.mark.parametrize("kl_estimator", PENALTIES)
def test_every_setting_equals_the_oracle(make_trainer, kl_estimator, settings):
    trainer = make_trainer(**{"max_steps": 2} | settings)
    oracle = train_and_check(trainer, BranchGuide(threshold=1.0), kl_estimator=kl_estimator)
    inputs = [i for step in oracle.steps for i in step["inputs"]]
    if "mask_truncated_completions" in settings:
        assert any((i["completion_mask"].sum(-1) == 0).any() for i in inputs)
    if "num_iterations" in settings:
        assert any("old_per_token_logps" in i for i in inputs)


@pytest.mark.parametrize("kl_estimator", PENALTIES)
def test_far_from_the_reference_the_bounds_are_the_oracles(make_trainer, kl_estimator):
    trainer = make_trainer(max_steps=2, lora_noise=0.8, temperature=0.5)
    oracle = train_and_check(trainer, TokenGuide(), kl_estimator=kl_estimator)
    d = torch.cat(
        [
            (signals.ref_logps - signals.policy_logps + log_guide)[signals.mask.bool()]
            for step in oracle.steps
            for _, signals, log_guide in step["guides"]
        ]
    )
    reached = d.abs() > SLOPE_MAX if kl_estimator == "k2" else d > max(NAIVE_KNEE, 2.303)
    assert reached.any(), "a bound that no token reaches is not tested"
    for entry in trainer.state.log_history[:2]:
        assert entry["kl"] <= 200


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_without_a_guide_the_metrics_are_the_two_kls(make_trainer, kl_estimator):
    """`kl` is the penalty's mean; where a penalty replaces k3, the k3 to the reference is logged
    beside it.
    """
    trainer = estimator_trainer(make_trainer, kl_estimator, max_steps=2)
    oracle = train_and_check(trainer, kl_estimator=kl_estimator)
    for entry, step in zip(trainer.state.log_history[:2], oracle.steps, strict=True):
        assert entry["kl"] == pytest.approx(step["expected_kl"], rel=1e-4, abs=1e-6)
        assert not [name for name in entry if name.startswith("sage/")]
        assert ("kl/ref_k3" in entry) == (kl_estimator in PENALTIES)


def test_with_a_guide_the_k3_metrics_do_not_depend_on_the_penalty(make_trainer):
    trainer = make_trainer(max_steps=1)
    oracle = train_and_check(trainer, BranchGuide(threshold=1.0), kl_estimator="forward-kl")
    entry, rows = trainer.state.log_history[0], {"kl/ref_k3": [], "kl/anchor_k3": []}
    for (_, signals, log_guide), inputs in zip(
        oracle.steps[0]["guides"], oracle.steps[0]["inputs"], strict=True
    ):
        assert to_completion_layout(signals.mask, inputs).shape == signals.mask.shape
        for name, shift in (("kl/ref_k3", 0.0), ("kl/anchor_k3", log_guide)):
            d = signals.ref_logps + shift - signals.policy_logps
            k3 = (d.exp() - d - 1).clamp(max=UNSLOTH_K3_MAX) * signals.mask
            rows[name].append(k3.sum(-1) / signals.mask.sum(-1))
    for name, values in rows.items():
        assert entry[name] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4), name
    assert entry["sage/share_touched"] > 0


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_the_first_kl_is_zero(make_trainer, kl_estimator, exact_first_kl):
    trainer = estimator_trainer(make_trainer, kl_estimator, max_steps=1, lora_noise=0.0)
    with with_methods(trainer, kl_estimator=kl_estimator):
        trainer.train()
    assert abs(trainer.state.log_history[0]["kl"]) <= exact_first_kl


# --- the call of Unsloth's function ---


def batch():
    g = torch.Generator().manual_seed(0)
    new, ref, old, sampling = (-torch.rand((4, 6), generator=g) * 2 for _ in range(4))
    mask = (torch.arange(6) < torch.tensor([6, 3, 1, 0])[:, None]).long()
    return new, ref, old, sampling, mask, torch.tensor([1.0, -1.0, 0.5, 2.0])


SETTINGS = {
    "plain": {},
    "sequence": {"importance_sampling_level": "sequence"},
    "delta": {"delta": 0.9},
    "entropy mask": {"entropy_mask": (torch.arange(24).view(4, 6) % 2).float()},
    "vllm": {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "off-policy mask": {
        "off_policy_mask_threshold": 0.1,
        "get_off_policy_mask": lambda advantages, **_: (advantages > 0).float(),
    },
    "accumulation": {"current_gradient_accumulation_steps": 3},
    "processes": {"num_processes": 2, "steps_per_generation": 2},
    "sample weight": {"sample_weight": torch.tensor([0.4, 0.3, 0.2, 0.1])},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_settings_of_the_policy_term_leave_the_penalty_alone(unsloth_module, loss_type, settings):
    """What Unsloth's loss has at β less what it has at β = 0, for k3 and for k2: only the values
    per token differ.
    """
    new, ref, old, sampling, mask, advantages = batch()
    kernel = vars(unsloth_module)[trainer_names.KERNEL]
    settings = {
        "loss_type": loss_type,
        "num_items_in_batch": 10,
        "max_completion_length": 6,
    } | settings
    beta = 0.5

    def run(kernel, beta, ref):
        x = new.clone().requires_grad_()
        result = kernel(ref, x, old, sampling, mask, mask, beta, advantages, **settings)
        return result, torch.autograd.grad(result[0], x)[0]

    plain, plain_gradient = run(kernel, 0.0, ref)
    result, gradient = run(make_kernel(PENALTIES["k2"], kernel), beta, ref)

    # Unsloth's own k3, weighted to be k2 token by token, is linear in the weights: read them off
    # its gradient.
    _, k3_gradient = run(kernel, beta, ref)
    d = (ref - new) * mask
    weights = torch.where(d != 0, (k3_gradient - plain_gradient) / -torch.expm1(d), 0.0)
    torch.testing.assert_close(gradient - plain_gradient, weights * -d, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        result[0] - plain[0], (weights * 0.5 * d**2).sum(), rtol=1e-4, atol=1e-6
    )
    assert weights.sum() > 0
    for mine, theirs in zip(result[3:], plain[3:], strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kl_estimator", ["k3", *PENALTIES])
@pytest.mark.parametrize(("upstream_scale", "grad_output"), [(None, 7.0), (2.0, 3.0)])
def test_every_scale_is_unsloths(
    make_trainer, unsloth_module, kl_estimator, upstream_scale, grad_output
):
    """fp16's scaler and DeepSpeed's factor scale the penalty's gradient as they scale the policy's.

    Unsloth's function answers backward with the gradient that it computed in forward, whatever
    comes in from above, unless a factor is asked for. A penalty beside the function would be scaled
    by what comes in.
    """
    from unsloth_zoo import rl_replacements

    new, ref, _, _, mask, advantages = batch()
    trainer = make_trainer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    settings = {"loss_type": "grpo"}
    gradients = {}
    guide = None if kl_estimator in PENALTIES else BranchGuide(ratio=0.0)

    def accumulated_loss(new_logps, *arguments):
        """What Unsloth's loss does once it has the log-probs."""
        if guide is not None:
            entropies = torch.zeros_like(new_logps)
            assert rl_replacements.grpo_high_entropy_mask(trainer, entropies, mask, 0.5) is None
        return unsloth_module.UnslothEfficientGRPO.apply(new_logps, *arguments)

    trainer.compute_loss = accumulated_loss
    with with_methods(trainer, guide, kl_estimator=kl_estimator):
        for name, scale, upstream in (("plain", None, None), ("scaled", scaler, upstream_scale)):
            x = new.clone().requires_grad_()
            result = trainer.compute_loss(
                x,
                None,
                ref,
                None,
                None,
                mask,
                mask,
                advantages,
                trainer.beta,
                scale,
                1,
                settings,
                upstream,
            )
            assert len(result) == 6
            gradients[name] = torch.autograd.grad(result[0], x, torch.tensor(grad_output))[0]
    x = new.clone().requires_grad_()
    loss = grpo_loss(
        x,
        ref,
        mask,
        advantages,
        beta=trainer.beta,
        kl_estimator=PENALTIES.get(kl_estimator, kl_estimator),
    )
    expected = torch.autograd.grad(loss, x)[0]
    torch.testing.assert_close(gradients["plain"], expected, rtol=1e-5, atol=1e-7)
    factor = 1024 * (1 if upstream_scale is None else upstream_scale * grad_output)
    torch.testing.assert_close(gradients["scaled"], factor * expected, rtol=1e-5, atol=1e-4)


def test_a_loss_that_keeps_its_entropies_is_refused(make_trainer, unsloth_module):
    new, ref, _, _, mask, advantages = batch()
    trainer = make_trainer()
    settings = (None, 1, {"loss_type": "grpo"}, None)

    def accumulated_loss(new_logps, *arguments):
        return unsloth_module.UnslothEfficientGRPO.apply(new_logps, *arguments)

    trainer.compute_loss = accumulated_loss
    with (
        guided_kl(trainer, BranchGuide(threshold=1.0)),
        pytest.raises(trainer_names.ContractError, match="must hand its entropies"),
    ):
        logps = (new.requires_grad_(), None, ref, None, None)
        trainer.compute_loss(*logps, mask, mask, advantages, trainer.beta, *settings)
    assert isinstance(unsloth_module.UnslothEfficientGRPO, type), "as it was"


def test_masked_positions_do_not_matter(unsloth_module):
    new, ref, _, _, mask, advantages = batch()
    kernel = make_kernel(PENALTIES["k2"], vars(unsloth_module)[trainer_names.KERNEL])
    outside = mask == 0
    results = []
    for filling in (0.0, float("inf"), float("nan")):
        x = torch.where(outside, -filling, new).requires_grad_()
        dirty = torch.where(outside, filling, ref)
        result = kernel(dirty, x, None, None, mask, mask, 0.5, advantages, loss_type="grpo")
        results.append((result[0], result[2], torch.autograd.grad(result[0], x)[0]))
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert torch.equal(found, expected)


# --- what is replaced, and what is refused ---


@pytest.mark.parametrize("kl_estimator", ["k3", "k3-is"])
def test_without_a_guide_unsloths_own_estimators_replace_nothing(
    make_trainer, unsloth_module, kl_estimator
):
    trainer = estimator_trainer(make_trainer, kl_estimator)
    before, callbacks = dict(vars(unsloth_module)), list(trainer.callback_handler.callbacks)
    with with_methods(trainer, kl_estimator=kl_estimator):
        assert dict(vars(unsloth_module)) == before
        # The last two compare checkpoints and look for nan and inf.
        assert trainer.callback_handler.callbacks[:-2] == callbacks
    assert trainer.callback_handler.callbacks == callbacks


def test_undone_after_an_exception(make_trainer, unsloth_module):
    """And replaced while this trainer's loss runs, no longer."""
    before, during = dict(vars(unsloth_module)), {}
    trainer, quantile = make_trainer(), 1.0

    def fail(*args, **kwargs):
        during.update(vars(unsloth_module))
        raise KeyError

    trainer.compute_loss = fail
    guide = BranchGuide(threshold=1.0)
    with pytest.raises(KeyError), with_methods(trainer, guide, kl_estimator="k2"):
        assert dict(vars(unsloth_module)) == before
        trainer.train()
    changed = {name for name in before if during[name] is not before[name]}
    assert changed == {trainer_names.KERNEL, trainer_names.FUNCTION}
    assert dict(vars(unsloth_module)) == before
    assert trainer.compute_loss is fail and trainer.args.top_entropy_quantile == quantile


def test_another_trainer_keeps_its_penalty(make_trainer):
    alone = make_trainer(max_steps=1)
    alone.train()
    beside = make_trainer(max_steps=1)
    with with_methods(make_trainer(), kl_estimator="k2"):
        beside.train()
    for key in ("loss", "kl", "grad_norm"):
        assert alone.state.log_history[0][key] == beside.state.log_history[0][key]


def test_a_step_that_bypasses_the_penalty_stops_training(make_trainer):
    trainer = make_trainer()
    original = trainer.compute_loss
    with (
        pytest.raises(trainer_names.ContractError, match="step 1 did not"),
        with_methods(trainer, kl_estimator="k2"),
    ):
        trainer.compute_loss = original
        trainer.train()


@pytest.mark.parametrize(
    ("kl_estimator", "ratio_inside", "remedy"),
    [
        ("k3", True, r"use_bias_correction_kl=False\), or open kl_penalty\(trainer, 'k3-is'"),
        ("k3-is", False, r"use_bias_correction_kl=True\), or open kl_penalty\(trainer, 'k3'"),
        ("k2", True, r"use_bias_correction_kl=False\)"),
    ],
)
def test_settings_that_contradict_the_estimator_are_refused(
    make_trainer, kl_estimator, ratio_inside, remedy
):
    trainer = make_trainer(use_bias_correction_kl=ratio_inside)
    both = (
        f"kl_estimator='{kl_estimator}' and use_bias_correction_kl={ratio_inside}. Set GRPOConfig"
    )
    with (
        pytest.raises(ValueError, match=both + ".*" + remedy),
        with_methods(trainer, kl_estimator=kl_estimator),
    ):
        pass


def test_estimators_without_an_effect_or_a_meaning_are_refused(make_trainer, monkeypatch):
    trainer = make_trainer()
    with pytest.raises(ValueError, match="kl_estimator must be one of"):
        with_methods(trainer, kl_estimator="k4").__enter__()
    monkeypatch.setenv("UNSLOTH_GRPO_ROLLOUT_RS", "token_k1")
    with pytest.raises(ValueError, match=r"UNSLOTH_GRPO_ROLLOUT_RS must not .*'token_k1'"):
        with_methods(trainer, kl_estimator="k2").__enter__()
    monkeypatch.delenv("UNSLOTH_GRPO_ROLLOUT_RS")
    trainer.args.loss_type = "cispo"
    with pytest.raises(ValueError, match=r"loss_type must be one of .* got loss_type='cispo'"):
        with_methods(trainer, kl_estimator="k2").__enter__()
    trainer.args.loss_type = "grpo"
    trainer.beta = 0.0
    with pytest.raises(ValueError, match=r"beta must not be 0 .*kl_estimator='k2'"):
        with_methods(trainer, kl_estimator="k2").__enter__()
    with guided_kl(trainer):
        pass


def test_a_version_is_tested_as_it_is_named():
    assert importlib.metadata.version("unsloth") in trainer_names.TESTED_VERSIONS
