"""What would train another loss without a word: written signals, changed settings, other guides."""

import functools
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.objective.describe import describe
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.patch.trained_with import describe_function, describe_teacher
from sage_unsloth.trainers.trainer_names import ContractError


class Returns:
    """A guide that returns what a function makes of the signals."""

    needs = frozenset({"entropies"})

    def __init__(self, function):
        self.function = function

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return self.function(signals)


def zeros(signals):
    return torch.zeros(signals.mask.shape)


def train(trainer, guide, **settings):
    with with_methods(trainer, guide, **settings):
        trainer.train()
    return trainer


# --- What a guide must not do ---


@pytest.mark.parametrize("name", ["policy_logps", "ref_logps", "mask", "entropies"])
def test_a_guide_that_writes_into_a_signal_is_refused(make_trainer, name):
    def write(signals):
        getattr(signals, name)[0].add_(1)  # a view counts, too
        return zeros(signals)

    with pytest.raises(ValueError, match=rf"must not write.*wrote into {name}\. .*{name}\.clone"):
        train(make_trainer(max_steps=1), Returns(write))


def test_shape_that_writes_is_refused(make_trainer):
    with pytest.raises(ValueError, match=r"must not write.*wrote into advantages"):
        train(make_trainer(max_steps=1), None, shape=lambda s, a: a.mul_(2))


def test_a_guide_that_works_on_copies_is_not(make_trainer):
    def copies(signals):
        signals.policy_logps.clone().mul_(2)
        return zeros(signals)

    train(make_trainer(max_steps=1), Returns(copies))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda s: None, "must return a float32 tensor .*got None"),
        (lambda s: 0.0, "must return a float32 tensor .*got 0.0"),
        (lambda s: zeros(s).double(), "float32 .*got torch.float64"),
        (lambda s: zeros(s)[:, :1], r"got torch.float32 \(8, 1\)"),
        (lambda s: zeros(s) + 1e30, r"\|log_guide\| must be at most 20 nats"),
        (lambda s: zeros(s) - 21, r"\|log_guide\| must be at most 20 nats"),
        (lambda s: zeros(s) + torch.inf, "must be finite"),
    ],
)
def test_what_a_guide_must_not_return(make_trainer, result, message):
    with pytest.raises(ValueError, match=message):
        train(make_trainer(max_steps=1), Returns(result))


@pytest.mark.parametrize("log_q", [19.9, -19.9])
def test_the_bound_of_log_q_itself_is_allowed(make_trainer, log_q):
    train(make_trainer(max_steps=1), Returns(lambda s: zeros(s) + log_q))


@pytest.mark.parametrize("guide", [BranchGuide, TokenGuide])
def test_a_class_is_no_guide(make_trainer, guide):
    with (
        pytest.raises(TypeError, match=rf"an instance, got the class {guide.__name__}"),
        guided_kl(make_trainer(), guide),
    ):
        pass


# --- What must not change while it is open ---


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beta", 0.1, "beta was 0.05 and is 0.1"),
        ("use_bias_correction_kl", True, "use_bias_correction_kl was False and is True"),
        ("loss_type", "bnpo", "loss_type was 'grpo' and is 'bnpo'"),
    ],
)
@pytest.mark.parametrize("guide", [BranchGuide(), None])
def test_a_setting_that_changes_stops_training(make_trainer, name, value, message, guide):
    from transformers import TrainerCallback

    trainer = make_trainer(max_steps=3)

    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            setattr(trainer if name == "beta" else args, name, value)

    trainer.add_callback(Change())
    with pytest.raises(ValueError, match=message):
        train(trainer, guide)
    assert trainer.state.global_step == 1


def test_two_threads_cannot_open_it(make_trainer):
    found = []

    def open_it(trainer):
        try:
            with guided_kl(trainer, BranchGuide()):
                pass
        except ContractError as error:
            found.append(str(error))

    first, second = make_trainer(), make_trainer()
    with guided_kl(first, BranchGuide()):
        thread = threading.Thread(target=open_it, args=(second,))
        thread.start()
        thread.join()
    assert len(found) == 1 and "must not be nested" in found[0]
    open_it(second)
    assert len(found) == 1


def test_one_without_a_guide_is_alone_too(make_trainer):
    with (
        guided_kl(make_trainer(), None),
        pytest.raises(ContractError, match="nested"),
        guided_kl(make_trainer(), BranchGuide()),
    ):
        pass


def test_an_evaluation_is_no_step(make_trainer, caplog):
    trainer = make_trainer(max_steps=1, per_device_eval_batch_size=8)
    with guided_kl(trainer, BranchGuide()):
        trainer.evaluate(trainer.train_dataset.select(range(8)))
    assert "closed before its trainer took a step" in caplog.text
    trainer = make_trainer(max_steps=1, per_device_eval_batch_size=8)
    plain = trainer.compute_loss
    with (
        pytest.raises(ContractError, match="step 1 did not"),
        guided_kl(trainer, BranchGuide()),
    ):
        trainer.evaluate(trainer.train_dataset.select(range(8)))
        trainer.compute_loss = plain
        trainer.train()


def test_a_context_without_a_step_says_so(make_trainer, caplog):
    trainer = make_trainer(max_steps=1)
    with guided_kl(trainer, BranchGuide(ratio=0.7)):
        pass
    (record,) = caplog.records
    assert (
        "closed before its trainer took a step" in record.message and "ratio=0.7" in record.message
    )
    caplog.clear()
    train(trainer, BranchGuide())
    assert "closed before its trainer took a step" not in caplog.text


def test_a_batch_from_before_the_context_is_made_anew(make_trainer):
    """The second iteration on a batch whose first was outside: it has no entropies of π_ref."""
    settings = {"num_iterations": 2, "gradient_accumulation_steps": 1}
    trainer = make_trainer(max_steps=1, **settings)
    trainer.train()
    before = trainer._buffered_inputs
    assert before is not None
    train(trainer, BranchGuide(source="reference", threshold=0.5))
    assert "sage_ref_entropies" in trainer._buffered_inputs[0]
    logged = [entry for entry in trainer.state.log_history if "sage/ref_entropy" in entry]
    assert logged and logged[0]["sage/guide_mean"] > 1


# --- What a checkpoint was trained with ---


@pytest.fixture
def checkpoint(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=1, save_strategy="steps", save_steps=1)
    train(trainer, BranchGuide(ratio=0.3))
    return tmp_path / "out" / "checkpoint-1"


def resume(make_trainer, checkpoint, guide, trainer_settings=None, **settings):
    trainer = make_trainer(max_steps=2, **(trainer_settings or {}))
    with with_methods(trainer, guide, **settings):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


@pytest.mark.parametrize(
    ("guide", "settings", "trainer_settings", "message"),
    [
        (BranchGuide(ratio=0.5), {}, {}, r"guide was BranchGuide\(ratio=0.3.* and is .*ratio=0.5"),
        (TokenGuide(), {}, {}, "guide was BranchGuide.* and is TokenGuide"),
        (None, {}, {}, "guide was BranchGuide.* and is None"),
        (BranchGuide(ratio=0.3), {"kl_estimator": "k2"}, {}, "trainer.s own and is k2"),
        (BranchGuide(ratio=0.3), {}, {"beta": 0.1}, "beta was 0.05 and is 0.1"),
        (AdaptiveGuide(BranchGuide(), 0.01), {}, {}, "holds none for AdaptiveGuide"),
    ],
)
def test_other_choices_are_refused(
    make_trainer, checkpoint, guide, settings, trainer_settings, message
):
    with pytest.raises(ValueError, match=message):
        resume(make_trainer, checkpoint, guide, trainer_settings, **settings)
    resumed = resume(
        make_trainer, checkpoint, guide, trainer_settings, resume_with_changes=True, **settings
    )
    assert resumed.state.global_step == 2


def scale(factor):
    return lambda signals, advantages: advantages * factor


def add(signals, advantages, amount=1.0):
    return advantages + amount


class Shapes:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, signals, advantages):
        return advantages * self.factor

    def method(self, signals, advantages):
        return advantages - self.factor


def test_a_function_is_described_by_its_name_code_and_settings():
    texts = [
        describe_function(function)
        for function in (
            None,
            add,
            functools.partial(add, amount=2.0),
            functools.partial(add, amount=3.0),
            scale(1.0),
            scale(2.0),
            lambda signals, advantages: advantages * 2,
            lambda signals, advantages: advantages * 3,
            lambda signals, advantages: [(lambda a: a * 2)(advantages)][0],
            lambda signals, advantages: [(lambda a: a * 3)(advantages)][0],
            Shapes(1.0),
            Shapes(2.0),
            Shapes(1.0).method,
            Shapes(2.0).method,
            torch.relu,
        )
    ]
    assert len(set(texts)) == len(texts) and not any("0x" in text for text in texts)
    assert texts[0] == "None" and texts[1].startswith("add ") and "amount=2.0" in texts[2]
    assert describe_function(scale(2.0)) == texts[5]
    assert describe_function(Shapes(2.0).method) == texts[-2]


@pytest.mark.long
def test_a_function_is_the_same_in_another_process():
    """A set among its constants is in another order there."""
    code = (
        "from sage_unsloth.patch.trained_with import describe_function as d\n"
        "print(d(lambda s, a: a if 'x' in {'alpha', 'beta', 'gamma', 'delta'} else -a))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1


def test_another_function_or_teacher_is_refused(make_trainer, tmp_path):
    """A teacher of the same class with other weights, too."""
    from conftest import tiny_model

    guide, saves = TeacherGuide(), dict(max_steps=1, save_strategy="steps", save_steps=1)
    choices = dict(teacher=frozen(tiny_model(0.1)), shape=scale(1.5))
    train(make_trainer(**saves), guide, **choices)
    checkpoint = tmp_path / "out" / "checkpoint-1"
    for name, other, message in (
        ("shape", scale(2.5), r"shape was scale.*factor=1.5.*factor=2.5"),
        ("shape", None, "shape was scale.* and is None"),
        ("teacher", frozen(tiny_model(0.2)), "teacher was PeftModel.* and is PeftModel"),
    ):
        with pytest.raises(ValueError, match=message):
            resume(make_trainer, checkpoint, guide, **choices | {name: other})
    again = choices | {"teacher": frozen(tiny_model(0.1)), "shape": scale(1.5)}
    assert resume(make_trainer, checkpoint, guide, **again).state.global_step == 2


def test_a_teacher_that_is_an_adapter_is_told_by_its_weights(make_trainer):
    trainer = make_trainer()
    trainer.model.add_adapter("teacher", trainer.model.peft_config["default"])
    before = describe_teacher(trainer, "teacher")
    assert before.startswith("the adapter teacher ")
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if ".default." in name:
                weight.mul_(2)
    assert describe_teacher(trainer, "teacher") == before
    with torch.no_grad():
        trainer.model.get_parameter(
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.teacher.weight"
        ).mul_(2)
    assert describe_teacher(trainer, "teacher") != before


def frozen(model):
    from sage_unsloth.trainers.loading import prepare_for_cpu

    return prepare_for_cpu(model).requires_grad_(False).eval()


def test_the_same_choices_and_an_older_checkpoint_resume(make_trainer, checkpoint, caplog):
    assert resume(make_trainer, checkpoint, BranchGuide(ratio=0.3)).state.global_step == 2
    file = checkpoint / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["SageGuide"]  # as before it was recorded
    file.write_text(json.dumps(state))
    assert resume(make_trainer, checkpoint, TokenGuide()).state.global_step == 2
    assert "does not record its settings, so resuming with TokenGuide" in caplog.text


def test_another_guide_with_a_state_begins_at_its_own(make_trainer, tmp_path):
    """Not at the strength that was steered to another target."""
    first = AdaptiveGuide(BranchGuide(threshold=0.1), target=0.3)
    train(make_trainer(max_steps=1, save_strategy="steps", save_steps=1), first)
    assert first.strength != 1.0
    checkpoint = tmp_path / "out" / "checkpoint-1"
    strengths = {}
    for target in (0.3, 0.6):
        guide = AdaptiveGuide(BranchGuide(threshold=0.1), target=target)
        trainer = resume(make_trainer, checkpoint, guide, resume_with_changes=True)
        logged = [entry for entry in trainer.state.log_history if "sage/strength" in entry]
        strengths[target] = logged[-1]["sage/strength"]
    assert strengths == {0.3: pytest.approx(first.strength), 0.6: 1.0}


class Own:
    """A user's guide, with a setting, a set, a wrapped guide, and something it collects."""

    needs = frozenset()

    def __init__(self, scale):
        self.scale = scale
        self.names = {"b", "a"}
        self.inner = RandomGuide(CosineSchedule(0.1, 0.0))
        self.seen = []

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return zeros(signals)


class Slots:
    __slots__ = ("scale",)
    needs = frozenset()

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return zeros(signals)


def test_a_guide_without_settings_to_read_is_described_by_its_class(make_trainer):
    assert describe(Slots()) == "Slots()"
    train(make_trainer(max_steps=1), Slots())


def test_a_guide_inside_another_is_described_by_its_settings():
    """Its own text would be a memory address, which another process does not have."""
    text = describe(AdaptiveGuide(Own(1.5), 0.1))
    assert text == describe(AdaptiveGuide(Own(1.5), 0.1)) and "scale=1.5" in text
    assert "0x" not in text and "strength" not in text.replace("_strength", "")


def test_a_guide_is_described_by_its_settings():
    assert describe(None) == "None"
    assert describe(BranchGuide(ratio=0.5)) == repr(BranchGuide(ratio=0.5))
    own, other = Own(1.5), Own(1.5)
    other.seen.append(torch.zeros(3))
    assert describe(own) == describe(other) != describe(Own(2.5))
    assert describe(own).startswith("Own(inner=RandomGuide(epsilon=CosineSchedule(")
    assert "scale=1.5" in describe(own) and "names=[\"'a'\", \"'b'\"]" in describe(own)


# --- Steps that measure nothing ---


def test_a_step_without_a_token_does_not_move_an_adaptive_guide(make_trainer):
    guide = AdaptiveGuide(BranchGuide(threshold=0.1), target=0.3)
    trainer = make_trainer(
        max_steps=3,
        max_completion_length=3,
        mask_truncated_completions=True,
        generation_kwargs={"suppress_tokens": [0, 1]},  # no completion ends, so all are masked
    )
    train(trainer, guide)
    assert trainer.state.global_step == 3
    assert guide.strength == 1.0
    ends = make_trainer(max_steps=3, max_completion_length=12, mask_truncated_completions=False)
    train(ends, guide)
    assert guide.strength != 1.0


@pytest.mark.parametrize(
    ("make_guide", "moments"),
    [
        (lambda: AdaptiveGuide(TokenGuide(), target=0.05), ["on_step_end"]),
        (lambda: RandomGuide(CosineSchedule(0.5, 0.5)), ["on_step_end"]),
        # Between the micro-batches of a step: the second must not get the noise of the first.
        (lambda: RandomGuide(CosineSchedule(0.5, 0.5)), ["on_substep_end", "on_step_end"]),
    ],
)
def test_evaluations_move_neither_noise_nor_strength(make_trainer, make_guide, moments):
    """Weights of a run that evaluates in between are those of a run that does not."""
    from transformers import TrainerCallback

    weights, guides = [], []
    for evaluates in (False, True):
        trainer = make_trainer(
            max_steps=3, per_device_eval_batch_size=8, gradient_accumulation_steps=2
        )

        def evaluate(self, args, state, control, trainer=trainer, **kwargs):
            random = torch.get_rng_state()  # rollouts of the evaluation draw from it
            trainer.evaluate(trainer.train_dataset.select(range(8)))
            torch.set_rng_state(random)

        if evaluates:
            between = type("Evaluate", (TrainerCallback,), dict.fromkeys(moments, evaluate))
            trainer.add_callback(between())
        guides.append(make_guide())
        train(trainer, guides[-1])
        evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(evaluations) == evaluates * 3 * len(moments)
        weights.append([p.detach().clone() for p in trainer.model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    strengths = [getattr(guide, "strength", None) for guide in guides]
    assert strengths[0] == strengths[1] != 1.0


def test_a_step_that_was_interrupted_gets_its_own_noise_again(make_trainer):
    """Training stops between two micro-batches of a step and begins once more, in one context."""
    seeds = []

    class Records(RandomGuide):
        def log_guide(self, signals, *, step, max_steps, generator=None):
            seeds.append((step, generator.initial_seed()))
            if len(seeds) == 1:
                raise KeyboardInterrupt
            return super().log_guide(signals, step=step, max_steps=max_steps, generator=generator)

    trainer = make_trainer(max_steps=1, gradient_accumulation_steps=2)
    with guided_kl(trainer, Records()):
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
    interrupted, first, second = seeds
    assert interrupted == first != second and second[0] == 0
