"""Attributes are replaced and put back, whatever happens in between; a guide's clock."""

import types

import pytest
import torch

from sage_unsloth.trainers.clock import Clock
from sage_unsloth.trainers.replaced import replace_attributes, with_callback


class Owner:
    def method(self):
        return "class"


def test_a_method_of_the_class_is_seen_again_and_others_keep_theirs():
    owner, other = Owner(), Owner()
    with replace_attributes(owner, method=lambda: "ours"):
        assert (owner.method(), other.method()) == ("ours", "class")
    assert owner.method() == "class"
    assert vars(owner) == {}


def test_an_attribute_of_the_instance_comes_back_after_an_exception():
    owner = Owner()
    owner.method = "own"
    with pytest.raises(KeyError), replace_attributes(owner, method="ours", new=1):
        assert (owner.method, owner.new) == ("ours", 1)
        raise KeyError
    assert vars(owner) == {"method": "own"}


def test_what_fails_half_way_or_is_taken_away_inside_is_put_back():
    class Frozen:
        fixed = property(lambda self: "fixed")

    owner = Frozen()
    owner.first = "own"
    with pytest.raises(AttributeError), replace_attributes(owner, first="ours", fixed="ours"):
        pass
    assert vars(owner) == {"first": "own"}
    with replace_attributes(owner, first="ours", new=1):
        del owner.new
    assert vars(owner) == {"first": "own"}


def test_overlapping_contexts_close_in_reverse_order():
    module = types.ModuleType("module")
    module.loss = "plain"
    with replace_attributes(module, loss="first"):
        with replace_attributes(module, loss="second"):
            assert module.loss == "second"
        assert module.loss == "first"
    assert module.loss == "plain"


def test_a_callback_leaves_after_an_exception():
    callbacks = []
    trainer = types.SimpleNamespace(add_callback=callbacks.append, remove_callback=callbacks.remove)
    with pytest.raises(KeyError), with_callback(trainer, "ours"):
        assert callbacks == ["ours"]
        raise KeyError
    assert callbacks == []


def place(step=3, training=True, process=0, seed=1):
    return types.SimpleNamespace(
        state=types.SimpleNamespace(global_step=step, max_steps=10),
        args=types.SimpleNamespace(seed=seed, max_steps=-1),
        model=types.SimpleNamespace(training=training),
        accelerator=types.SimpleNamespace(process_index=process),
    )


def draws(trainer, count=2):
    clock = Clock(trainer)
    return [torch.rand(3, generator=clock.tick()[2]).tolist() for _ in range(count)]


def test_every_micro_batch_has_noise_of_its_own_and_a_resumed_run_the_same():
    first = draws(place())
    assert first == draws(place())
    different = [first, draws(place(step=4)), draws(place(training=False))]
    different += [draws(place(process=1)), draws(place(seed=2))]
    flat = [tuple(numbers) for pair in different for numbers in pair]
    assert len(set(flat)) == len(flat) == 10


def test_micro_batches_are_counted_anew_in_each_step():
    trainer = place()
    clock = Clock(trainer)
    assert clock.tick()[:2] == (3, 10)
    clock.tick()
    trainer.state.global_step = 4
    step, max_steps, generator = clock.tick()
    assert (step, max_steps) == (4, 10)
    assert torch.rand(3, generator=generator).tolist() == draws(place(step=4))[0]
