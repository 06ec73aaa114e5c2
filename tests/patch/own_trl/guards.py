"""Refusals, drift, guards and resuming under TRL's own trainer."""

import importlib
import inspect
import json
import linecache
import math
import pkgutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROWS
from oracle import Recording
from trl_trainer import build_trl_trainer, letters

from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.own_penalty import PENALTY_HOOK, check_penalties
from sage_unsloth.objective.guides import BranchGuide, RandomGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.patch.seam import check_contract
from sage_unsloth.trainers.bad_batch import reproduce
from sage_unsloth.trainers.finite import NotFiniteError
from sage_unsloth.trainers.trainer_names import ContractError

BRANCH = BranchGuide(threshold=1.0)
SAVES = dict(save_strategy="steps", save_steps=1)


@pytest.fixture
def make_trainer(tmp_path):
    return partial(build_trl_trainer, output_dir=str(tmp_path / "out"), max_steps=2, reward=letters)


def trained_weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_nothing_of_the_patch_imports_unsloth():
    """In a process that has imported every module of these rooms."""
    code = (
        "import importlib, pkgutil, sys\n"
        "for room in ('patch', 'trainers', 'objective'):\n"
        "    package = importlib.import_module('sage_unsloth.' + room)\n"
        "    for module in pkgutil.iter_modules(package.__path__):\n"
        "        importlib.import_module(f'sage_unsloth.{room}.{module.name}')\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'unsloth', 'unsloth_zoo', 'trl'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    import sage_unsloth.patch as patch

    assert len(list(pkgutil.iter_modules(patch.__path__))) > 10


# --- Refusals ---


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"use_bias_correction_kl": True}, {"guide": BRANCH}, "True for kl_estimator 'k3-is'"),
        ({}, {"kl_estimator": "k2", "k3_bounded": True}, "bounded is for the estimators"),
        ({"rows": [{"text": "a"}] * 8}, {"guide": BRANCH}, "must have a column 'prompt'"),
    ],
    ids=["estimator", "bound", "column"],
)
def test_what_the_trainer_contradicts_is_refused(make_trainer, settings, options, message):
    trainer = make_trainer(**settings)
    with pytest.raises(ValueError, match=message), with_methods(trainer, **options):
        pass


def test_another_trainer_is_refused():
    class Trainer:
        pass

    with (
        pytest.raises(ContractError, match=r"got .*Trainer, .*trl 1\.15\.0 and 1\.16\.0"),
        guided_kl(Trainer(), BRANCH),
    ):
        pass


@pytest.mark.parametrize("kl_estimator", ["k3", "k2"])
def test_everything_is_undone(make_trainer, kl_estimator):
    trainer = make_trainer()
    from trl.trainer import utils

    of_class, kernel = type(trainer)._compute_loss, utils._ChunkedLogProbFunction
    before, callbacks = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    with pytest.raises(KeyError), with_methods(trainer, BRANCH, kl_estimator=kl_estimator):
        assert "_compute_loss" in vars(trainer)
        raise KeyError
    assert set(vars(trainer)) == before and PENALTY_HOOK not in before
    assert trainer.callback_handler.callbacks == callbacks
    assert type(trainer)._compute_loss is of_class
    assert utils._ChunkedLogProbFunction is kernel


# --- Drift ---


def drifted(old, new):
    """TRL's trainer with a loss whose source differs in one place, as a new TRL might."""
    module = importlib.import_module("trl.trainer.grpo_trainer")
    source = inspect.getsource(module.GRPOTrainer._compute_loss)
    assert source.count(old) == 1, source.count(old)
    text = inspect.cleandoc("\n" + source.replace(old, new)) + "\n"
    name = f"<drifted {hash(new)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    found = {}
    exec(compile(text, name, "exec"), vars(module), found)
    (loss,) = found.values()
    loss.__module__ = module.__name__
    return type("GRPOTrainer", (module.GRPOTrainer,), {"_compute_loss": loss})


PENALTY = (
    "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
)
DRIFTS = {
    "nothing": ("# Compute the loss\n", "# Compute it\n", None),
    "another penalty": (PENALTY, "(ref_per_token_logps - per_token_logps) ** 2", "must compute"),
    "the reference is read before the scoring": (
        'prompt_ids, prompt_mask = inputs["prompt_ids"], inputs["prompt_mask"]\n',
        'prompt_ids, prompt_mask = inputs["prompt_ids"], inputs["prompt_mask"]\n'
        '        inputs = dict(inputs)\n',
        "must compute the loss",
    ),
    "another argument": ("(self, model, inputs):", "(self, model, inputs, scale=1):", "parameters"),
    "the sign of the KL": (
        "per_token_loss = per_token_loss + self.beta * per_token_kl",
        "per_token_loss = per_token_loss - self.beta * per_token_kl",
        "must compute the loss",
    ),
    "the ratio in the KL": (
        "per_token_kl = per_token_kl * coef_1",
        "per_token_kl = per_token_kl * coef_1.detach()",
        "must compute the loss with the penalty 'k3-is'",
    ),
    "an attribute that is not known": (
        "if self.top_entropy_quantile < 1.0:",
        "if self.quantile_of_a_new_trl < 1.0:",
        "AttributeError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("drift", DRIFTS)
def test_drift_is_refused(drift):
    old, new, message = DRIFTS[drift]
    changed = drifted(old, new)
    if message is None:
        check_contract(changed)
        check_penalties(changed)
        return
    with pytest.raises(ContractError, match=message):
        check_contract(changed)


def test_a_penalty_that_is_written_otherwise_is_not_replaced():
    changed = drifted(PENALTY, f"1.0 * ({PENALTY})")
    check_contract(changed)
    with pytest.raises(ContractError, match="must assign"):
        check_penalties(changed)


def test_a_loss_that_bypasses_the_guide_stops_after_one_step(make_trainer):
    trainer = make_trainer()
    plain = type(trainer)._compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        return plain(trainer, model, inputs)

    trainer.compute_loss = compute_loss
    with (
        guided_kl(trainer, BRANCH),
        pytest.raises(ContractError, match=r"step 1 did not.*a call of _compute_loss"),
    ):
        trainer.train()


# --- Numbers that are not finite ---


def test_a_reference_that_is_nan_stops_the_step_and_its_batch_repeats_it(make_trainer, tmp_path):
    def broken(trainer):
        score = trainer._generate_and_score_completions

        def with_nan(inputs):
            batch = score(inputs)
            if trainer.state.global_step == 1:
                batch["ref_per_token_logps"] = batch["ref_per_token_logps"].clone()
                batch["ref_per_token_logps"][2] = math.nan
            return batch

        trainer._generate_and_score_completions = with_nan
        return trainer

    trainer = broken(make_trainer())
    with guided_kl(trainer, BRANCH), pytest.raises(NotFiniteError) as first:
        trainer.train()
    assert "in step 2, ref_logps is nan at row" in str(first.value)
    again = make_trainer(output_dir=str(tmp_path / "other"))
    with guided_kl(again, BRANCH), pytest.raises(NotFiniteError) as second:
        reproduce(again, tmp_path / "out" / "bad_batch")
    assert str(second.value).replace("/other/", "/out/") == str(first.value)
    assert equal(trained_weights(trainer), trained_weights(again))


# --- Resuming ---


def test_a_resumed_run_is_the_whole_one(make_trainer, tmp_path):
    """With TRL's copy of the adapter that training began with ("ref"): were it left in the
    checkpoint, transformers would restore it alone."""

    def run(folder, resume=None):
        trainer = make_trainer("ref", output_dir=str(tmp_path / folder), max_steps=3, **SAVES)
        recording = Recording(RandomGuide())
        with guided_kl(trainer, recording):
            trainer.train(resume_from_checkpoint=resume)
        return {call["step"]: call["log_guide"] for call in recording.calls}, trainer

    values, whole = run("whole")
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    assert not (checkpoint / "ref").exists() and (checkpoint / "adapter_config.json").exists()
    again, resumed = run("again", str(checkpoint))
    assert sorted(again) == [1, 2]
    assert all(torch.equal(values[step], again[step]) for step in again)
    for (name, a), (_, b) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_another_reference_and_trainer_are_refused(make_trainer, tmp_path):
    def resume(options, **settings):
        trainer = make_trainer("ref", output_dir=str(tmp_path / "b"), **settings)
        with with_methods(trainer, **({"guide": BRANCH} | options)):
            trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    trainer = make_trainer("ref", max_steps=1, **SAVES)
    with guided_kl(trainer, BRANCH):
        trainer.train()
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(ValueError, match=r"adapter ref was the adapter ref .* and is the adapter"):
        resume({}, lora_noise=0.06)
    path = Path(checkpoint) / "trainer_state.json"
    state = json.loads(path.read_text())
    record = state["stateful_callbacks"]["SageGuide"]["args"]
    assert record["trainer"] == "trl"
    record["trainer"] = "unsloth"
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="trainer was unsloth and is trl"):
        resume({})


def test_a_trainer_beside_it_is_not_guided(make_trainer, tmp_path):
    """What is replaced is the trainer's own."""
    other = make_trainer(output_dir=str(tmp_path / "other"), rows=ROWS[:8])
    with with_methods(make_trainer(), BRANCH, kl_estimator="k2"):
        other.train()
    assert all("sage/guide_mean" not in row for row in other.state.log_history)
