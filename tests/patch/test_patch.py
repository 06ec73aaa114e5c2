"""The guided loss, proven on Unsloth's generated trainer: values, gradients, refusals, and that it
is undone.
"""

import importlib.util
import inspect
import linecache
import math
import sys
import types

import pytest
import torch
from conftest import pairs
from oracle import Oracle, Recording, train_and_check

from sage_unsloth.methods.own_penalty import POLICY_ONLY, check_switches
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.patch.contract import check_unsloth
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.trainers import trainer_names
from sage_unsloth.trainers.loading import load_unsloth
from sage_unsloth.trainers.trainer_names import ContractError

pytestmark = pytest.mark.usefixtures("unsloth_module")

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
GUIDES = {
    "branch": BranchGuide(threshold=1.0),
    "token": TokenGuide(),
    "token-rank": TokenGuide(norm="rank"),
    "random": RandomGuide(epsilon=CosineSchedule(0.6, 0.3)),
}


class Ones:
    """q ≡ 1 that asks for nothing."""

    needs = frozenset()

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return torch.zeros(signals.mask.shape)


class OnesWithEntropies(Ones):
    needs = frozenset({"entropies"})


class Constant:
    """q ≡ c with inf and nan where the mask is 0."""

    needs = frozenset()

    def __init__(self, q):
        self.q = q

    def log_guide(self, signals, *, step, max_steps, generator=None):
        outside = torch.tensor([math.inf, -math.inf, math.nan]).repeat(signals.mask.numel())
        outside = outside[: signals.mask.numel()].view(signals.mask.shape)
        return torch.where(signals.mask.bool(), math.log(self.q), outside)


def trained(trainer, guide=None):
    """Loss and gradient of every optimizer step, as bytes of float32, and the final weights."""
    record = []

    from transformers import TrainerCallback

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            record.append(
                {
                    n: p.grad.clone()
                    for n, p in trainer.model.named_parameters()
                    if p.grad is not None
                }
            )

    trainer.add_callback(Gradients())
    if guide is None:
        trainer.train()
    else:
        with guided_kl(trainer, guide):
            trainer.train()
    weights = {
        n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad
    }
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(record) == len(losses) == trainer.args.max_steps
    assert all(any(g.abs().max() > 0 for g in step.values()) for step in record)
    return losses, record, weights


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


# --- q ≡ 1 is the unpatched trainer ---


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_q_of_one_is_bitwise_the_unpatched_trainer(make_trainer, loss_type):
    plain = trained(make_trainer(loss_type=loss_type, max_steps=2))
    guided = trained(make_trainer(loss_type=loss_type, max_steps=2), Ones())
    assert plain[0] == guided[0]
    for before, after in zip([*plain[1], plain[2]], [*guided[1], guided[2]], strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_q_of_one_with_entropies_is_the_unpatched_trainer(make_trainer, loss_type):
    plain = trained(make_trainer(loss_type=loss_type, max_steps=2))
    guided = trained(make_trainer(loss_type=loss_type, max_steps=2), OnesWithEntropies())
    assert guided[0] == pytest.approx(plain[0], rel=1e-6, abs=1e-7)
    for before, after in zip(plain[1], guided[1], strict=True):
        scale = max(g.abs().max().item() for g in before.values())
        assert largest_difference(before, after) <= 1e-6 * scale


# --- values and gradients against plain torch ---


@pytest.mark.parametrize(("guide", "loss_type"), pairs(GUIDES, {name: name for name in LOSS_TYPES}))
def test_loss_and_gradients_equal_the_oracle(make_trainer, loss_type, guide):
    oracle = train_and_check(
        make_trainer(loss_type=loss_type, max_steps=2, max_completion_length=24), guide
    )
    lengths = {
        n
        for step in oracle.steps
        for i in step["inputs"]
        for n in i["completion_mask"].sum(-1).tolist()
    }
    assert len(lengths) > 2, "padding of different lengths is part of this test"
    touched = [
        (log_guide != 0).any().item() for step in oracle.steps for _, _, log_guide in step["guides"]
    ]
    assert any(touched), "a guide that does nothing proves nothing"


SETTINGS = [
    {"use_bias_correction_kl": True},
    {"num_iterations": 2, "max_steps": 4},
    {"num_iterations": 2, "max_steps": 4, "use_bias_correction_kl": True, "loss_type": "dapo"},
    {"importance_sampling_level": "sequence", "num_iterations": 2},
    {"gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "loss_type": "bnpo"},
    {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 4,
        "loss_type": "dr_grpo",
    },
    {"mask_truncated_completions": True},
    {"epsilon": 0.02, "epsilon_high": 0.1, "num_iterations": 3, "loss_type": "dapo"},
    {"temperature": 0.7},
]


@pytest.mark.parametrize(
    ("settings", "guide"),
    pairs(
        {"-".join(f"{k}={v}" for k, v in s.items()): s for s in SETTINGS},
        {"none": None, "branch": BranchGuide(threshold=1.0), "token": TokenGuide()},
    ),
)
def test_every_setting_equals_the_oracle(make_trainer, settings, guide):
    trainer = make_trainer(**{"max_steps": 3} | settings)
    oracle = train_and_check(trainer, guide)
    masks = [i["completion_mask"] for step in oracle.steps for i in step["inputs"]]
    if settings.get("mask_truncated_completions"):
        assert any((mask.sum(-1) == 0).any() for mask in masks), (
            "all-masked rows are part of this test"
        )
    if settings.get("num_iterations", 1) > 1:
        assert any("old_per_token_logps" in i for step in oracle.steps for i in step["inputs"])


@pytest.mark.smoke
@pytest.mark.parametrize("hidden_states", [True, False])
def test_both_ways_of_scoring_equal_the_oracle(
    make_trainer, unsloth_module, monkeypatch, hidden_states
):
    """On a GPU Unsloth scores hidden states through the output head, chunk by chunk; some models
    give logits instead.
    """
    from unsloth.models import rl

    seen = set()
    original = unsloth_module._unsloth_grpo_returns_hidden_states

    def record(*args):
        seen.add(original(*args))
        return original(*args)

    monkeypatch.setattr(unsloth_module, "_unsloth_grpo_returns_hidden_states", record)
    trainer = make_trainer(max_steps=2)
    if not hidden_states:
        setattr(trainer.model.get_base_model(), rl._UNSLOTH_GRPO_HIDDEN_STATES_UNSAFE_ATTR, True)
    train_and_check(trainer, BranchGuide(threshold=1.0))
    assert seen == {hidden_states}


def test_far_from_the_reference_unsloths_bound_on_k3_is_the_only_difference(make_trainer):
    """A policy this far off has tokens with k3 > 10; with the same bound the oracle still
    agrees.
    """
    oracle = train_and_check(make_trainer(max_steps=2, lora_noise=0.3), BranchGuide(threshold=1.0))
    d = torch.cat(
        [
            (s.ref_logps - s.policy_logps + g).flatten()
            for step in oracle.steps
            for _, s, g in step["guides"]
        ]
    )
    assert (d.exp() - d - 1).max() > 10


@pytest.mark.smoke
def test_branch_guide_is_computed_from_the_true_entropies(make_trainer):
    oracle = train_and_check(make_trainer(max_steps=2), BranchGuide(threshold=1.0))
    for step in oracle.steps:
        for _, signals, log_guide in step["guides"]:
            expected = (1 + 0.3 * (signals.entropies - 1.0).clamp(min=0)).clamp(0.6, 1.4).log()
            torch.testing.assert_close(log_guide, expected * signals.mask, rtol=0, atol=1e-5)


def test_constant_guide_shifts_the_first_kl_by_its_closed_form(make_trainer):
    trainer = make_trainer(lora_noise=0.0, max_steps=1)
    with guided_kl(trainer, Constant(1.4)):
        trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["kl"] == pytest.approx(0.4 - math.log(1.4), abs=1e-6)
    assert entry["kl/anchor_k3"] == pytest.approx(entry["kl"], abs=1e-6)


def test_first_plain_kl_is_zero(make_trainer, exact_first_kl):
    trainer = make_trainer(lora_noise=0.0, max_steps=1)
    with guided_kl(trainer, BranchGuide(threshold=1.0)):
        trainer.train()
    entry = trainer.state.log_history[0]
    assert abs(entry["kl/ref_k3"]) <= exact_first_kl
    assert entry["kl"] > 1e-3


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_chunking_does_not_matter(make_trainer, chunks):
    guide = BranchGuide(threshold=1.0)
    whole = trained(make_trainer(max_steps=1, unsloth_grpo_mini_batch=8), guide)
    settings = {"unsloth_grpo_mini_batch": 8 // chunks, "unsloth_logit_chunk_multiplier": chunks}
    parts = trained(make_trainer(max_steps=1, **settings), guide)
    scale = max(g.abs().max().item() for g in whole[1][0].values())
    assert largest_difference(whole[1][0], parts[1][0]) <= 1e-5 * scale


def test_no_gradient_flows_through_the_guide(make_trainer):
    class Leaky(BranchGuide):
        def log_guide(self, signals, **time):
            assert not any(t.requires_grad for t in vars(signals).values() if t is not None)
            with torch.enable_grad():
                return super().log_guide(signals, **time) * torch.ones((), requires_grad=True)

    oracle = train_and_check(make_trainer(max_steps=1), Leaky(threshold=1.0))
    assert oracle.steps


def test_masked_positions_do_not_matter(make_trainer):
    losses, _, weights = trained(make_trainer(max_steps=2), Constant(1.2))
    assert all(math.isfinite(loss) for loss in losses)
    assert all(w.isfinite().all() for w in weights.values())
    train_and_check(make_trainer(max_steps=2), Constant(1.2))


def test_beta_zero_never_calls_the_guide(make_trainer):
    """Set while it is open: the step is refused before the guide sees anything."""
    recording = Recording(Ones())
    trainer = make_trainer(max_steps=1)
    with (
        pytest.raises(ValueError, match=r"beta was 0.05 and is 0.0"),
        guided_kl(trainer, recording),
    ):
        trainer.beta = 0.0
        trainer.train()
    assert recording.calls == []


def test_another_trainer_is_not_guided(make_trainer):
    plain = trained(make_trainer(max_steps=1))
    with guided_kl(make_trainer(max_steps=1), Constant(1.4)):
        beside = trained(make_trainer(max_steps=1))
    assert plain[0] == beside[0]
    assert largest_difference(plain[2], beside[2]) == 0


# --- metrics ---


def test_metrics_are_those_of_the_whole_step(make_trainer):
    trainer = make_trainer(max_steps=3, gradient_accumulation_steps=2)
    oracle = train_and_check(trainer, BranchGuide(threshold=2.5))
    for entry, step in zip(trainer.state.log_history, oracle.steps, strict=False):
        q, entropies, ref_k3, anchor_k3 = [], [], [], []
        for _, signals, log_guide in step["guides"]:
            valid = signals.mask.bool()
            q.append(log_guide[valid].exp())
            entropies.append(signals.entropies[valid])
            d = signals.ref_logps - signals.policy_logps
            for d_guided, rows in ((d, ref_k3), (d + log_guide, anchor_k3)):
                k3 = (d_guided.exp() - d_guided - 1) * signals.mask
                rows.append(k3.sum(-1) / signals.mask.sum(-1))
        q = torch.cat(q)
        expected = {
            "sage/guide_mean": q.mean(),
            "sage/guide_min": q.min(),
            "sage/guide_max": q.max(),
            "sage/log_guide_mean": q.log().mean(),
            "sage/share_touched": (q != 1).double().mean(),
            "sage/entropy": torch.cat(entropies).mean(),
            "kl/ref_k3": torch.cat(ref_k3).mean(),
            "kl/anchor_k3": torch.cat(anchor_k3).mean(),
            "kl": torch.cat(anchor_k3).mean(),
        }
        assert 0 < expected["sage/share_touched"] < 1
        for name, value in expected.items():
            assert entry[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name


# --- time ---


def test_guide_time_is_the_optimizer_step(make_trainer):
    recording = Recording(TokenGuide())
    trainer = make_trainer(max_steps=2, gradient_accumulation_steps=2, num_iterations=2)
    with guided_kl(trainer, recording):
        trainer.train()
    assert [call["step"] for call in recording.calls] == [0, 0, 1, 1]
    assert {call["max_steps"] for call in recording.calls} == {2}
    assert not torch.equal(recording.calls[0]["log_guide"], recording.calls[1]["log_guide"])


def test_resumed_run_goes_on_with_the_same_guide_values(make_trainer, tmp_path):
    guide = RandomGuide(epsilon=CosineSchedule(0.9, 0.5))

    def guide_values(folder, **settings):
        recording = Recording(guide)
        resume = settings.pop("resume", None)
        trainer = make_trainer(
            output_dir=str(folder), save_strategy="steps", save_steps=2, **settings
        )
        with guided_kl(trainer, recording):
            trainer.train(resume_from_checkpoint=resume)
        weights = {
            n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad
        }
        return {call["step"]: call["log_guide"] for call in recording.calls}, weights

    whole, weights = guide_values(tmp_path / "whole", max_steps=4, gradient_accumulation_steps=1)
    again, resumed = guide_values(
        tmp_path / "again",
        max_steps=4,
        gradient_accumulation_steps=1,
        resume=str(tmp_path / "whole" / "checkpoint-2"),
    )
    assert sorted(again) == [2, 3]
    for step, values in again.items():
        assert torch.equal(values, whole[step])
    assert largest_difference(weights, resumed) == 0


# --- refusals ---


def test_undone_after_an_exception(make_trainer, unsloth_module):
    before = dict(vars(unsloth_module))
    trainer = make_trainer()
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(KeyError), guided_kl(trainer, Ones()):
        assert "compute_loss" in vars(trainer)
        raise KeyError
    assert dict(vars(unsloth_module)) == before and "compute_loss" not in vars(trainer)
    assert trainer.callback_handler.callbacks == callbacks


def test_nesting_is_refused(make_trainer):
    trainer = make_trainer()
    with guided_kl(trainer, Ones()):
        with pytest.raises(ContractError, match="nested"), guided_kl(trainer, Ones()):
            pass
        with pytest.raises(ContractError, match="nested"), guided_kl(make_trainer(), Ones()):
            pass


def test_trl_fallback_trainer_is_refused(make_trainer):
    # Unsloth has put its class in the place of TRL's, so load TRL's own file once more.
    original = importlib.import_module("trl.trainer.grpo_trainer").__file__
    spec = importlib.util.spec_from_file_location("trl.trainer.grpo_trainer_original", original)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    trainer = make_trainer()
    stranger = object.__new__(module.GRPOTrainer)
    vars(stranger).update(beta=0.05, processing_class=trainer.processing_class)
    with (
        pytest.raises(ContractError, match=r"got trl\.trainer\.grpo_trainer.*2026\.10\.7"),
        guided_kl(stranger, Ones()),
    ):
        pass


def drifted(module, old, new):
    """A copy of the trainer's module whose source differs in one place, as a new Unsloth might."""
    source = inspect.getsource(module)
    assert old in source
    copy = types.ModuleType("drifted")
    vars(copy).update(vars(module))
    copy.__file__ = f"<drifted {hash(new)}>"
    text = source.replace(old, new)
    linecache.cache[copy.__file__] = (len(text), None, text.splitlines(True), copy.__file__)
    exec(compile(text, copy.__file__, "exec"), vars(copy))
    return copy


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "def grpo_accumulated_loss(\n    trainer,\n    input_ids,",
            "def grpo_accumulated_loss(\n    trainer,\n    ids,",
            "begin with",
        ),
        (
            "def grpo_compute_loss(\n    ref,\n    new,",
            "def grpo_compute_loss(\n    new,\n    ref,",
            "begin with",
        ),
        (
            'getattr(trainer.args, "top_entropy_quantile", 1.0)',
            'getattr(trainer.args, "entropy_quantile", 1.0)',
            "must decide by this setting",
        ),
        (
            "grpo_high_entropy_mask as _grpo_high_entropy_mask,",
            "grpo_high_entropy_mask as _grpo_entropy_mask,",
            "must import grpo_high_entropy_mask as _grpo_high_entropy_mask once",
        ),
        (
            "selective_log_softmax_recompute as _entropy_log_softmax,",
            "selective_log_softmax_recompute as _log_softmax_with_entropy,",
            "must import chunked_.*_recompute as _entropy_log_softmax once",
        ),
        (
            "trainer, new_entropies.detach(), completion_mask,",
            "trainer, completion_mask, new_entropies.detach(),",
            "must call _grpo_high_entropy_mask once, with these arguments first",
        ),
        (
            "= UnslothEfficientGRPO.apply(",
            "= UnslothFastGRPO.apply(",
            "must call UnslothEfficientGRPO.apply once",
        ),
        (
            "                new_logprobs,\n                old_logps,\n                ref_logps,",
            "                new_logprobs,\n                ref_logps,\n                old_logps,",
            "must call UnslothEfficientGRPO.apply once, with these arguments first",
        ),
        (
            "coef_1, _mask  = grpo_compute_loss(",
            "coef_1, _mask  = grpo_fused_loss(",
            "must call grpo_compute_loss once",
        ),
        (
            "flat_is_ratio, coef_1, mask\n\nclass",
            "flat_is_ratio, coef_1\n\nclass",
            "must return 7 values",
        ),
        (
            "torch.clamp(ref - new, min = -20.0, max = 20.0)",
            "torch.clamp(new - ref, min = -20.0, max = 20.0)",
            "compute the loss",
        ),
        *(
            (f'kwargs.get("{name}",', f'kwargs.get("other_{name}",', f"got none named {name},")
            for name in POLICY_ONLY
        ),
    ],
    ids=[
        "parameter",
        "order",
        "setting",
        "mask",
        "scorer",
        "arguments of the mask",
        "call",
        "arguments",
        "kernel",
        "values",
        "sign",
        *POLICY_ONLY,
    ],
)
def test_drift_is_refused(unsloth_module, old, new, message):
    with pytest.raises(ContractError, match=message) as error:
        module = drifted(unsloth_module, old, new)
        check_unsloth(module)
        check_switches(vars(module)[trainer_names.KERNEL])
    for part in ("got", "expected", *trainer_names.TESTED_VERSIONS):
        assert part in str(error.value)


def test_missing_target_is_refused(unsloth_module):
    copy = types.ModuleType("copy")
    vars(copy).update(vars(unsloth_module))
    del copy.UnslothEfficientGRPO
    with pytest.raises(ContractError, match="must define UnslothEfficientGRPO"):
        check_unsloth(copy)


def test_a_loss_that_bypasses_the_guide_stops_after_one_step(make_trainer):
    trainer = make_trainer()
    original = trainer.compute_loss
    with pytest.raises(ContractError, match="step 1 did not"), guided_kl(trainer, Ones()):
        trainer.compute_loss = original
        trainer.train()
    assert trainer.state.global_step == 1


def test_bad_guides_and_trainers_are_refused_before_any_work(make_trainer):
    trainer = make_trainer()
    with pytest.raises(TypeError, match="needs"), guided_kl(trainer, object()):
        pass
    trainer.beta = 0.0
    with pytest.raises(ValueError, match="beta must not be 0"), guided_kl(trainer, Ones()):
        pass
    trainer.beta = 0.05
    trainer.processing_class.pad_token = None
    with pytest.raises(ValueError, match="pad token"), guided_kl(trainer, Ones()):
        pass


def test_a_model_that_unsloth_cannot_train_is_refused(make_trainer):
    trainer = make_trainer()
    del trainer.model.for_training
    with pytest.raises(ValueError, match=r"for_training.*load_policy"), guided_kl(trainer, Ones()):
        pass


def test_a_missing_column_is_refused_before_any_work(make_trainer):
    from sage_unsloth.grading.grader import Grader
    from sage_unsloth.grading.reward import SolutionReward

    with Grader() as grader:
        trainer = make_trainer(reward=SolutionReward(grader))
        with (
            pytest.raises(ValueError, match=r"'answer', but it has \['prompt'\]. Rename"),
            guided_kl(trainer, Ones()),
        ):
            pass
    trainer = make_trainer()
    trainer.train_dataset = trainer.train_dataset.rename_column("prompt", "question")
    with (
        pytest.raises(ValueError, match=r"'prompt', but it has \['question'\]"),
        guided_kl(trainer, Ones()),
    ):
        pass


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda mask: torch.zeros(3), "mask's shape"),
        (lambda mask: torch.zeros(mask.shape, dtype=torch.float64), "float32"),
        (lambda mask: torch.full(mask.shape, math.nan), "finite"),
    ],
    ids=["shape", "dtype", "nan"],
)
def test_a_guide_that_returns_nonsense_is_refused(make_trainer, result, message):
    class Nonsense(Ones):
        def log_guide(self, signals, **time):
            return result(signals.mask)

    trainer = make_trainer()
    with pytest.raises(ValueError, match=message), guided_kl(trainer, Nonsense()):
        trainer.train()


def test_load_unsloth_is_idempotent(unsloth_module):
    assert load_unsloth() is unsloth_module


def test_oracle_notices_a_wrong_loss(make_trainer):
    """The comparison itself must be able to fail: the trainer gets another guide than the oracle is
    told.
    """

    class Lying(Recording):
        def log_guide(self, signals, **time):
            result = super().log_guide(signals, **time)
            return torch.where(signals.mask.bool(), result + 0.05, 0.0)

    recording = Lying(Ones())
    trainer = make_trainer(max_steps=1)
    oracle = Oracle(trainer, recording)
    with guided_kl(trainer, recording):
        trainer.train()
    with pytest.raises(AssertionError, match=r"off by|expected"):
        oracle.check()


@pytest.mark.parametrize("beta", [0.05, 0.0])
def test_entropy_is_logged_without_a_guide_and_the_loss_stays(make_trainer, beta):
    """GRPO with and without the measuring: the same steps; without a KL term there is no KL to
    log.
    """
    plain = make_trainer(beta=beta, max_steps=2)
    plain.train()
    measured = make_trainer(beta=beta, max_steps=2)
    with guided_kl(measured, log_entropy=True):
        measured.train()
    for before, after in zip(
        plain.state.log_history[:2], measured.state.log_history[:2], strict=True
    ):
        assert "sage/entropy" not in before and after["sage/entropy"] > 0
        assert ("kl/ref_k3" in after) == (beta != 0)
        assert "sage/guide_mean" not in after
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5)
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-4, abs=1e-7)


def test_standby_comes_too_late_once_unsloth_is_there(unsloth_module, monkeypatch, caplog):
    import os

    from sage_unsloth.trainers.loading import load_unsloth

    monkeypatch.delenv("UNSLOTH_VLLM_STANDBY", raising=False)
    load_unsloth(standby=True)
    assert "UNSLOTH_VLLM_STANDBY" not in os.environ
    assert "imported without standby" in caplog.text
