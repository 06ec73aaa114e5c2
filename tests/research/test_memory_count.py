"""The count of live bytes: by hand, against PyTorch's allocator, and a straight line in layers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from research import memory_count
from research.live_bytes import LiveBytes
from research.memory_count import SCORE_ONCE, Case, Policy, count_case, count_step
from sage_unsloth.patch.scoring import logps_and_entropies
from sage_unsloth.planning.architecture import Architecture

ROOT = Path(__file__).parents[2]
TINY = Architecture(
    num_layers=2,
    hidden_size=64,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    tied_embeddings=True,
    max_position_embeddings=64,
)
CASE = Case(model="tiny", scorer=SCORE_ONCE, prompt=8, completion=8, completions=4, micro_batch=2)


def count(case, architecture=TINY, fake=True):
    return count_step(case, architecture, logps_and_entropies, logps_and_entropies, fake=fake)


@pytest.mark.parametrize("fake", [True, False])
def test_bytes_by_hand(fake):
    """A 4 MiB tensor, a view of it, a product and its gradient."""
    mib = 2**20
    with FakeTensorMode() if fake else torch.enable_grad(), LiveBytes() as counter:
        x = torch.zeros(1024, 1024)
        row = x[0]
        assert counter.now == 4 * mib
        weight = torch.zeros(1024, 1024, requires_grad=True)
        result = (x @ weight).relu()  # the product goes when relu has read it
        assert counter.now == 12 * mib and counter.peak == 16 * mib
        result.sum().backward()
        assert weight.grad is not None
        del result
        assert counter.now == 12 * mib
        del x
        assert counter.now == 12 * mib, "its row is there"
        del row
        assert counter.now == 8 * mib
        with counter.on_host():
            torch.zeros(1024, 1024)
        assert counter.now == 8 * mib


def test_fake_and_real_tensors_count_alike():
    assert count(CASE) == count(CASE, fake=False)


def test_the_peak_is_that_of_pytorchs_allocator():
    """What PyTorch's own profiler sees allocated on the CPU in the same step."""
    from torch.profiler import ProfilerActivity, profile

    def step():
        policy, counter = Policy(TINY, 16), LiveBytes()
        ids = torch.zeros(4, 64, dtype=torch.long)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            policy.hidden(ids, "layers", counter).float().sum().backward()
        events = profiled.profiler.kineto_results.events()
        memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        now = peak = 0
        for _, size in memory:
            now += size
            peak = max(peak, now)
        return peak

    with LiveBytes() as counter:
        policy = Policy(TINY, 16)
        ids = torch.zeros(4, 64, dtype=torch.long)
        counter.restart()
        before = counter.now
        policy.hidden(ids, "layers", counter).float().sum().backward()
    assert counter.peak - before == pytest.approx(step(), rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", ["unsloth", "layers", "none"])
def test_bytes_are_a_straight_line_in_the_number_of_layers(checkpointing):
    case = replace(CASE, checkpointing=checkpointing)
    for layers in (4, 6):
        architecture = replace(TINY, num_layers=layers)
        extended = count_case(case, architecture, logps_and_entropies, logps_and_entropies)
        assert extended == count(case, architecture)


def test_weights_and_gradients_are_those_of_the_plan():
    from sage_unsloth.planning.memory import lora_parameters

    found = count(CASE)
    assert found["gradients"] == 4 * lora_parameters(TINY, 8)
    smaller = count(replace(CASE, bits=4))
    # Storages are rounded up to 512 bytes.
    saved = TINY.linear_parameters * (2 - memory_count.BYTES_PER_4BIT_WEIGHT)
    assert found["stays"] - smaller["stays"] == pytest.approx(saved, rel=0.06)


def test_what_must_need_more_does():
    least = count(replace(CASE, checkpointing="unsloth"))["update"]
    assert least < count(replace(CASE, checkpointing="layers"))["update"]
    assert least < count(replace(CASE, checkpointing="none"))["update"]
    assert least < count(replace(CASE, micro_batch=4))["update"]


def test_the_committed_count_knows_every_difference():
    found = json.loads((ROOT / "data/results/memory/count.json").read_text())["rows"]
    assert {row["case"]["model"] for row in found} == {*memory_count.ARCHITECTURES}
    for row in found:
        assert memory_count.reason(row) != "not known", row["case"]
        planned = memory_count.plan_of(Case(**row["case"]))["stays"]
        assert row["counted"]["stays"] == pytest.approx(planned, rel=0.01)


def test_a_guide_costs_next_to_nothing():
    """Of (B, T) it holds a few tensors, and never at the moment of the peak."""
    found = json.loads((ROOT / "data/results/memory/count.json").read_text())["rows"]
    plain, guided = (
        next(
            row["counted"]["update"]
            for row in found
            if row["case"]["scorer"] == SCORE_ONCE and row["case"]["guided"] == with_guide
        )
        for with_guide in (False, True)
    )
    assert 0 <= guided - plain < 2**20
