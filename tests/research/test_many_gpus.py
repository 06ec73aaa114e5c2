"""The cost of a step on paper, against arithmetic by hand for Qwen2.5-Math-7B and rank 8."""

from dataclasses import replace

import pytest

from research.many_gpus import Card, step_cost
from sage_unsloth.planning.presets import model_preset
from sage_unsloth.planning.setup import setup_for

N = 7_615_616_512
ADAPTER = 28 * 8 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
REACHED = 0.4 * 989e12
KV = 2 * 28 * 4 * 128 * 2


def setup(prompts=8, micro_batch=8):
    return setup_for(
        model_preset("qwen2.5-math-7b"),
        prompts_per_step=prompts,
        num_generations=8,
        micro_batch=micro_batch,
    )


def test_eight_cards_with_the_whole_model_each():
    cost = step_cost(setup(), 8)
    assert cost.exchanged == pytest.approx(2 * 7 / 8 * 4 * ADAPTER) == pytest.approx(141_295_616)
    drawing = 1024 * 2 * N / 3.35e12 + 8 * 1024 * (1024 + 512) * KV / 3.35e12
    assert cost.drawing == pytest.approx(drawing) == pytest.approx(4.87, abs=0.01)
    assert cost.scoring == pytest.approx(4 * N * 8 * 2048 / REACHED)
    assert cost.update == pytest.approx(6 * N * 8 * 2048 / REACHED)
    assert cost.tokens == 64 * 1024
    assert cost.tokens_per_second == pytest.approx(65_536 / cost.seconds)


def test_shared_weights_are_gathered_for_each_pass_of_each_micro_batch():
    whole, shared = step_cost(setup(64), 8), step_cost(setup(64), 8, "FSDP2")
    weights, gradients = 4 * 8 * 7 / 8 * 2 * N, 7 / 8 * 4 * ADAPTER
    assert shared.exchanged == pytest.approx(weights + gradients)
    spared = 2 * N * 7 / 8 + 16 * ADAPTER * 7 / 8
    gathered = 4 * 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944) / 28
    gathered += 2 * 152_064 * 3584
    assert whole.memory - shared.memory == pytest.approx(spared - gathered)
    assert shared.exchange == pytest.approx(shared.exchanged / 450e9)
    assert step_cost(setup(64), 64, "FSDP2").exchange > shared.exchange  # over the network


def test_many_completions_are_bound_by_products():
    slow = Card(flops=1e12, reached=1.0)
    assert step_cost(setup(), 1, card=slow).drawing > 1024 * 2 * N * 64 / 1e12


def test_what_the_arithmetic_does_not_cover_is_refused():
    with pytest.raises(ValueError, match="split must be DDP or FSDP2; got 'FSDP1'"):
        step_cost(setup(), 8, "FSDP1")
    with pytest.raises(ValueError, match="divisible by the cards; got 128"):
        step_cost(setup(), 128)
    with pytest.raises(ValueError, match="weight_bits=4"):
        step_cost(replace(setup(), weight_bits=4), 8)
