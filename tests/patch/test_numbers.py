"""Numbers that are not finite stop a run within the step, with the batch kept; input that is
degenerate, not wrong, trains.

What is not finite is put where it would come from: into the rewards, into what Unsloth hands to the
loss, into a gradient.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import pairs
from oracle import Recording, train_and_check

from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.credit import sequence_credit
from sage_unsloth.methods.penalties import KL_ESTIMATORS, PENALTIES
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.loss import LOSS_TYPES, grpo_loss
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.patch.scoring import logps_and_entropies
from sage_unsloth.patch.unsloth_seam import UnslothHook
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.runs.files import read_json
from sage_unsloth.trainers.bad_batch import reproduce
from sage_unsloth.trainers.finite import Guard, NotFiniteError, finite_only
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft

GUIDES = {
    "none": None,
    "branch": BranchGuide(threshold=1.0),
    "token": TokenGuide(),
    "random": RandomGuide(epsilon=CosineSchedule(0.6, 0.3)),
}
SEQUENCE = {"gradient_accumulation_steps": 1, "steps_per_generation": 1}
ARGUMENTS = (
    "policy_logps",
    "old_logps",
    "ref_logps",
    "sampling",
    "lm_head",
    "ids",
    "mask",
    "advantages",
)


def trained_weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def at_step(trainer, step, function):
    """Calls `function` when the trainer begins that step."""
    from transformers import TrainerCallback

    class At(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step - 1:
                function()

    trainer.add_callback(At())


# --- What is not finite ---


def poison(monkeypatch, trainer, name, value, place):
    """From the second step on, one number of what Unsloth hands to the loss is `value`."""
    original = UnslothHook.apply

    def apply(hook, *arguments):
        given = dict(zip([*ARGUMENTS, *range(len(arguments))], arguments, strict=False))
        if trainer.state.global_step >= 1:
            if name in ("ref_entropies", "teacher_logps"):
                tensor = hook.of_batch[name] = given["policy_logps"].detach().clone()
            elif name == "entropies":
                tensor = hook.entropies = hook.entropies.clone()
            else:
                if given[name] is None:
                    given[name] = given["policy_logps"].detach()
                tensor = given[name] = given[name].clone()
            row = place[0]
            if tensor.dim() == 2:
                tensor[row, given["mask"][row].nonzero()[place[1]]] = value
                tensor[given["mask"] == 0] = math.nan  # nobody minds it there
            else:
                tensor[row] = value
        return original(hook, *given.values())

    monkeypatch.setattr(UnslothHook, "apply", apply)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy_logps", math.nan),
        ("old_logps", math.inf),
        ("ref_logps", -math.inf),
        ("entropies", math.nan),
        ("ref_entropies", math.nan),
        ("teacher_logps", math.inf),
        ("advantages", math.nan),
    ],
)
def test_a_signal_that_is_not_finite_stops_the_step(make_trainer, monkeypatch, name, value):
    trainer = make_trainer(max_steps=3)
    before = {}
    at_step(trainer, 2, lambda: before.update(trained_weights(trainer)))
    row, place = (3, r"row 3 \(") if name == "advantages" else (1, r"row 1, token 0 \(")
    with guided_kl(trainer, log_entropy=True):
        poison(monkeypatch, trainer, name, value, (row, 0))
        with pytest.raises(NotFiniteError, match=f"in step 2, {name} is {value} at {place}"):
            trainer.train()
    after = trained_weights(trainer)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    record = read_json(trainer.args.output_dir + "/bad_batch/batch.json")
    assert (record["step"], record["what"], record["value"]) == (2, name, repr(value))


def test_the_kept_batch_gives_the_same_error_in_another_process_of_the_run(make_trainer, tmp_path):
    """A reference that is nan at one token, in the batch itself; the settings, the model and the
    guide are the run's.
    """
    guide = BranchGuide(threshold=1.0)

    def build(out):
        return make_trainer(max_steps=3, output_dir=str(tmp_path / out), learning_rate=0.05)

    trainer = build("first")
    score = trainer._generate_and_score_completions

    def broken(inputs):
        batch = score(inputs)
        if trainer.state.global_step >= 1:
            batch["ref_per_token_logps"] = batch["ref_per_token_logps"].clone()
            batch["ref_per_token_logps"][2] = math.nan
        return batch

    trainer._generate_and_score_completions = broken
    with guided_kl(trainer, guide), pytest.raises(NotFiniteError) as first:
        trainer.train()
    assert "ref_logps is nan at row" in str(first.value)
    folder = tmp_path / "first" / "bad_batch"
    assert {file.name for file in folder.iterdir()} == {
        "batch.json",
        "batch.safetensors",
        "weights.safetensors",
    }

    again = build("other")
    with guided_kl(again, guide), pytest.raises(NotFiniteError) as second:
        reproduce(again, folder)
    assert str(second.value).replace("/other/", "/first/") == str(first.value)
    expected, found = trained_weights(trainer), trained_weights(again)
    assert all(torch.equal(expected[n], found[n]) for n in expected)

    sound = build("sound")
    with guided_kl(sound, guide):
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "batch.safetensors")
        save_file(
            {n: t.nan_to_num() if t.is_floating_point() else t for n, t in tensors.items()},
            folder / "batch.safetensors",
        )
        reproduce(sound, folder)
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in sound.model.parameters())
    trained = sound.model
    trained.requires_grad_(False)
    with pytest.raises(ValueError, match="it trains 0 others"):
        reproduce(sound, folder)


class Broken:
    """A guide whose q_t is not finite at one token of row 2."""

    needs = frozenset()

    def __init__(self, value):
        self.value = value

    def log_guide(self, signals, *, step, max_steps, generator=None):
        result = torch.zeros(signals.mask.shape)
        if step == 1:
            result[2, signals.mask[2].nonzero()[0]] = self.value
        return result


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_guide_that_is_not_finite_stops_the_step(make_trainer, value):
    trainer = make_trainer(max_steps=3)
    with (
        guided_kl(trainer, Broken(value)),
        pytest.raises(NotFiniteError, match=rf"step 2, log_guide is {value} at row 2, token 0 \("),
    ):
        trainer.train()


@pytest.mark.parametrize("later", [False, True], ids=["function", "coroutine"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_stops_the_step(make_trainer, value, later):
    """TRL takes nan for "no reward" and turns inf into an advantage of 0."""
    calls = []

    def sound(completions, **_):
        return [float(len(c[0]["content"]) % 3) for c in completions]

    def broken(completions, **_):
        calls.append(len(completions))
        rewards = [None if i % 2 else 1.0 for i in range(len(completions))]
        if len(calls) == 2:
            rewards[5] = value
        return rewards

    async def broken_later(**given):
        return broken(**given)

    function = broken_later if later else broken
    function.__name__ = "broken"
    trainer = make_trainer(max_steps=3, reward=[sound, function])
    message = f"the reward of broken is {value} at row 5 \\(the weights are as before it"
    with guided_kl(trainer), pytest.raises(NotFiniteError, match=message):
        trainer.train()
    assert trainer.reward_funcs == [sound, function]
    record = read_json(trainer.args.output_dir + "/bad_batch/batch.json")
    assert record["rewards"][5] == repr(value) and len(record["completions"]) == calls[0]
    with pytest.raises(ValueError, match=r"keeps the reward of broken\. Call that function"):
        reproduce(trainer, trainer.args.output_dir + "/bad_batch")


@pytest.mark.parametrize("options", [{}, {"log_entropy": True}], ids=["plain", "through our hook"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    make_trainer, options, max_grad_norm
):
    trainer = make_trainer(max_steps=3, max_grad_norm=max_grad_norm)
    name, weight = [(n, p) for n, p in trainer.model.named_parameters() if "lora_B" in n][2]
    before = {}

    def break_it():
        before.update(trained_weights(trainer))

        def nan_at_one_place(gradient):
            gradient = gradient.clone()
            gradient[1, 2] = math.inf
            return gradient

        weight.register_hook(nan_at_one_place)

    at_step(trainer, 2, break_it)
    message = rf"in step 2, the gradient of {name} is inf at index 1, index 2 \(the weights are as"
    with with_methods(trainer, **options), pytest.raises(NotFiniteError, match=message):
        trainer.train()
    after = trained_weights(trainer)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_a_loss_that_is_not_finite_stops_the_step(make_trainer):
    """transformers logs the mean of the losses before it instead."""
    trainer = make_trainer(max_steps=3)
    plain = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        loss = plain(*args, **kwargs)
        return loss * math.nan if trainer.state.global_step == 1 else loss

    trainer.compute_loss = compute_loss
    with guided_kl(trainer), pytest.raises(NotFiniteError, match=r"in step 2, the loss is nan \("):
        trainer.train()
    assert trainer.compute_loss is compute_loss, "what was there before is there again"


def test_weights_that_a_step_ruins_reach_no_checkpoint(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=3, learning_rate=math.inf, save_strategy="steps", save_steps=1)
    message = (
        r"in step 1, the trained weight .* at index 0, index 0 \(the step has been made, and "
        r"no checkpoint has it\)\. .*bad_batch"
    )
    with guided_kl(trainer), pytest.raises(NotFiniteError, match=message):
        trainer.train()
    assert not list(tmp_path.glob("out/checkpoint-*"))


def test_gradients_that_the_scaling_of_fp16_overflows_are_left_to_the_scaler(make_trainer):
    trainer = make_trainer()
    (name, weight), *_ = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    weight.grad = torch.full_like(weight, math.inf)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = Guard(trainer)
    for scale in (4.0, 2.0):
        trainer.accelerator.scaler.scale(torch.ones(()))  # the scaler begins with its first loss
        assert trainer.accelerator.scaler.get_scale() == scale
        guard.check_backward(torch.zeros(()))
        trainer.accelerator.scaler.step(optimizer)
        trainer.accelerator.scaler.update()
    with pytest.raises(NotFiniteError, match=f"the gradient of {name} is "):
        guard.check_backward(torch.zeros(()))


def test_a_batch_that_cannot_be_kept_hides_nothing(make_trainer):
    trainer = make_trainer()
    trainer.args.output_dir = "/dev/null/nowhere"
    with pytest.raises(
        NotFiniteError, match=r"the loss is inf .* could not be kept: NotADirectoryE"
    ):
        Guard(trainer).check_backward(torch.tensor(math.inf))


def test_large_numbers_are_finite(make_trainer):
    """A sum or a norm that overflows only makes the guard look at the elements."""
    trainer = make_trainer()
    (_, weight), *_ = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    weight.grad = torch.full_like(weight, 1e38)
    guard = Guard(trainer)
    guard.check_backward(torch.zeros(()))
    guard.check_signals({"policy_logps": torch.full((2, 3), 3e38)}, torch.ones(2, 3))


def test_both_stages_stop(unsloth_module, tmp_path):
    config, base = smoke_config(), data_folder() / BASE_MODEL
    with pytest.raises(NotFiniteError, match="in step 1, the trained weight"):
        sft(
            replace(config.sft, learning_rate=math.inf, warmup_steps=0),
            base,
            arithmetic.problems("sft"),
            tmp_path / "sft",
        )
    settings = replace(config.rlvr, learning_rate=math.inf, warmup_ratio=0.0, preflight_prompts=0)
    with pytest.raises(NotFiniteError, match="in step 1, the trained weight"):
        rlvr(settings, base, arithmetic.problems("train"), tmp_path / "rl")
    for stage in ("sft", "rl"):
        assert not list(tmp_path.glob(f"{stage}/checkpoints/checkpoint-*"))
        assert (tmp_path / stage / "checkpoints" / "bad_batch" / "batch.json").exists()


def test_everything_is_undone(make_trainer):
    trainer = make_trainer()
    before = dict(vars(trainer))
    callbacks = list(trainer.callback_handler.callbacks)
    with finite_only(trainer):
        assert vars(trainer).keys() > before.keys()
    assert vars(trainer).keys() == before.keys()
    assert trainer.callback_handler.callbacks == callbacks


# --- What is degenerate ---


def edit_batches(trainer, edit):
    """`edit` changes each rollout batch before it is shuffled and split."""
    score = trainer._generate_and_score_completions

    def edited(inputs):
        batch = score(inputs)
        edit(batch)
        return batch

    trainer._generate_and_score_completions = edited


def only_padding(batch, rows):
    """Unsloth finds completions by the pad id, so an empty one is all padding."""
    batch["completion_ids"][rows] = 1
    batch["completion_mask"][rows] = 0
    batch["num_items_in_batch"] = batch["completion_mask"].sum()


def equal_rewards(trainer):
    return lambda oracle: all(
        (i["advantages"] == 0).all() for s in oracle.steps for i in s["inputs"]
    )


def empty_rows(trainer):
    edit_batches(trainer, lambda batch: only_padding(batch, slice(1, 3)))
    return lambda oracle: all(
        sum((i["completion_mask"].sum(-1) == 0).sum() for i in s["inputs"]) == 2
        for s in oracle.steps
    )


def empty_micro_batch(trainer):
    prepare, calls = trainer._prepare_inputs, []

    def edited(inputs):
        batch = prepare(inputs)
        calls.append(len(batch))
        if len(calls) % 2:
            for name in ("completion_ids", "completion_mask"):
                batch[name] = batch[name].clone()
            only_padding(batch, slice(None))
        return batch

    trainer._prepare_inputs = edited
    return lambda oracle: all(
        [bool(i["completion_mask"].any()) for i in s["inputs"]] == [False, True]
        for s in oracle.steps
    )


def of_one_token(trainer):
    return lambda oracle: all(
        i["completion_mask"].shape[1] == 1 for s in oracle.steps for i in s["inputs"]
    )


def of_one_row(trainer):
    return lambda oracle: all(
        len(i["completion_mask"]) == 1 and len(s["inputs"]) == 4
        for s in oracle.steps
        for i in s["inputs"]
    )


DEGENERATE = {
    "all rewards equal": (
        equal_rewards,
        {"reward": lambda completions, **_: [1.0] * len(completions)},
    ),
    "EOS at once": (of_one_token, {"generation_kwargs": {"suppress_tokens": list(range(1, 42))}}),
    "T = 1": (of_one_token, {"max_completion_length": 1}),
    "rows of padding": (empty_rows, {}),
    "a micro-batch of padding": (empty_micro_batch, {"gradient_accumulation_steps": 2}),
    "one row": (of_one_row, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
}


@pytest.mark.parametrize(
    ("case", "name"),
    pairs(
        {case: case for case in DEGENERATE},
        {name: name for name in ("branch", "token", "random", "sequence", "none")},
    ),
)
def test_degenerate_batches_train_as_the_plain_loss(make_trainer, case, name):
    prepare, settings = DEGENERATE[case]
    options = {}
    if name == "sequence":
        if "gradient_accumulation_steps" in settings:
            pytest.skip("refused: sequence credit needs all completions in one micro-batch")
        options = {"kl_estimator": "k2", "credit": "sequence"}
        settings = SEQUENCE | settings
    trainer = make_trainer(max_steps=2, **settings)
    is_so = prepare(trainer)
    guide = BranchGuide(threshold=1.0) if name == "sequence" else GUIDES[name]
    # Gradients of one row, or of one token, are small beside the terms that they are sums of, so
    # float32 shows more.
    rtol = 3e-5 if case in ("one row", "EOS at once") else 1e-5
    oracle = train_and_check(trainer, guide, rtol, log_entropy=True, **options)
    assert len(oracle.steps) == 2 and is_so(oracle), "the case is what it is called"
    weights = trained_weights(trainer)
    assert all(weight.isfinite().all() for weight in weights.values())
    for row in trainer.state.log_history:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row


@pytest.mark.parametrize("credit", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_but_padding_changes_nothing(make_trainer, loss_type, credit):
    trainer = make_trainer(max_steps=1, loss_type=loss_type, **SEQUENCE)
    edit_batches(trainer, lambda batch: only_padding(batch, slice(None)))
    before = trained_weights(trainer)
    with with_methods(trainer, BranchGuide(threshold=1.0), kl_estimator="k2", credit=credit):
        trainer.train()
    after = trained_weights(trainer)
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(make_trainer, dtype):
    """float16 is what a card before compute capability 8.0 trains in."""
    trainer = make_trainer(max_steps=2, learning_rate=0.05)
    trainer.model.to(dtype)
    before, guide = trained_weights(trainer), Recording(BranchGuide(threshold=1.0))
    with guided_kl(trainer, guide):
        trainer.train()
    after = trained_weights(trainer)
    assert all(w.dtype == dtype and w.isfinite().all() for w in after.values())
    assert any(not torch.equal(before[n], after[n]) for n in before)
    for call in guide.calls:
        valid = call["signals"].mask.bool()
        assert call["log_guide"].dtype == torch.float32
        assert (call["log_guide"][valid] > 0).any() and call["log_guide"].isfinite().all()
        # The policy, in 16 bits, is near the reference: what is scored is the same text.
        difference = call["signals"].policy_logps - call["signals"].ref_logps
        assert difference[valid].abs().median() < 1


DTYPES = [torch.float16, torch.bfloat16, torch.float32]
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
LOGPS = torch.tensor([[-0.5, -9.0, 0.0, -1.0], [-3.0, -1.0, -1.0, -1.0], [-1.0] * 4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "guide", [*GUIDES.values(), *(TokenGuide(norm=n) for n in ("rank", "zscore", "causal"))]
)
def test_guides_take_every_dtype_and_return_float32(guide, dtype):
    if guide is None:
        pytest.skip("q = 1 computes nothing")
    outside = torch.where(MASK.bool(), LOGPS, math.nan)
    signals = TokenSignals(outside.to(dtype), outside.to(dtype), MASK, entropies=-outside.to(dtype))
    log_guide = guide.log_guide(
        signals, step=0, max_steps=8, generator=torch.Generator().manual_seed(1)
    )
    exact = TokenSignals(
        signals.policy_logps.float(),
        signals.ref_logps.float(),
        MASK,
        entropies=signals.entropies.float(),
    )
    expected = guide.log_guide(
        exact, step=0, max_steps=8, generator=torch.Generator().manual_seed(1)
    )
    assert log_guide.dtype == torch.float32 and torch.equal(log_guide, expected)
    assert log_guide.isfinite().all() and (log_guide[~MASK.bool()] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_is_finite_in_every_dtype(dtype, kl_estimator, loss_type):
    """With a token that the reference all but excludes, and nan outside the mask."""
    outside = torch.where(MASK.bool(), LOGPS, math.nan).to(dtype)
    logps = outside.clone().requires_grad_()
    ref = torch.where(MASK.bool(), LOGPS - 30.0, math.nan).to(dtype)
    loss = grpo_loss(
        logps,
        ref,
        MASK,
        torch.tensor([1.0, -1.0, 0.0], dtype=dtype),
        log_guide=torch.full(MASK.shape, 0.3),
        beta=0.05,
        loss_type=loss_type,
        kl_estimator=PENALTIES.get(kl_estimator, kl_estimator),
        max_completion_length=4,
    )
    loss.backward()
    assert loss.isfinite() and logps.grad.isfinite().all()
    credit = sequence_credit(outside, ref, MASK, torch.tensor([0, 0, 0]), beta=0.05)
    assert credit.dtype == torch.float32 and credit.isfinite().all()


def test_a_vocabulary_of_one_token():
    """Every log-probability and entropy is 0: Branch and Token give q = 1, and the loss is the
    advantages' alone.
    """
    hidden = torch.randn(3, 4, 5, requires_grad=True)
    logps, entropies = logps_and_entropies(
        hidden, torch.randn(1, 5), torch.zeros(3, 4, dtype=torch.long)
    )
    assert (logps == 0).all() and (entropies == 0).all()
    logps.sum().backward()
    assert (hidden.grad == 0).all()
    logps = logps.detach()
    signals = TokenSignals(logps, logps, MASK, entropies=entropies)
    for name in ("branch", "token"):
        assert (GUIDES[name].log_guide(signals, step=0, max_steps=8) == 0).all()
    for norm in ("rank", "zscore", "causal"):
        assert TokenGuide(norm=norm).log_guide(signals, step=0, max_steps=8).isfinite().all()
    random = GUIDES["random"].log_guide(signals, step=0, max_steps=8)
    assert random.isfinite().all() and (random[~MASK.bool()] == 0).all()
    for kl_estimator in KL_ESTIMATORS:
        loss = grpo_loss(
            logps,
            logps,
            MASK,
            torch.tensor([1.0, -1.0, 0.0]),
            kl_estimator=PENALTIES.get(kl_estimator, kl_estimator),
        )
        assert loss == 0


@pytest.mark.parametrize("guide", [g for g in GUIDES.values() if g])
def test_guides_of_one_token_of_one_row(guide):
    one = torch.full((1, 1), -1.5)
    signals = TokenSignals(one, one, torch.ones(1, 1), entropies=-one)
    assert guide.log_guide(signals, step=0, max_steps=1).isfinite().all()
    empty = TokenSignals(one, one, torch.zeros(1, 1), entropies=-one)
    assert (guide.log_guide(empty, step=0, max_steps=1) == 0).all()


def test_the_record_of_a_bad_batch_is_plain_json(make_trainer):
    trainer = make_trainer()
    guard = Guard(trainer)
    guard.inputs = {"ids": torch.arange(3), "num_items_in_batch": 7, "images": None}
    with pytest.raises(NotFiniteError):
        guard.check_backward(torch.tensor(math.nan))
    folder = trainer.args.output_dir + "/bad_batch"
    with open(folder + "/batch.json") as file:
        record = json.load(file, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert record["inputs"] == {"num_items_in_batch": 7} and record["value"] == "nan"
