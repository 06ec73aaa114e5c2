"""The measurement of drawing on a CPU, at the size of a test."""

import pytest

from sage_unsloth.lab import sampling_speed


def test_ratios_are_taken_pair_by_pair():
    # 4/2, 9/3 and 2/4: the ratio of the medians, 4/3, would be another one.
    assert sampling_speed.ratios([4.0, 9.0, 2.0], [2.0, 3.0, 4.0]) == [0.5, 2.0, 3.0]


def test_both_ways_draw_the_same_completions(monkeypatch):
    for name in ("PROBLEMS", "SAMPLES", "REPEATS"):
        monkeypatch.setattr(sampling_speed, name, 2)
    monkeypatch.setitem(sampling_speed.MIXES, "a few tokens", (1.0, 6))
    row = sampling_speed.measure(sampling_speed.load_engine(), "a few tokens")
    assert row["completions"] == 4
    assert row["tokens"]["longest"] <= 6
    assert row["differ_from_batches"] == row["differ_in_other_order_and_size"] == 0
    least, median, most = row["times_as_fast"]
    assert 0 < least <= median <= most


@pytest.fixture(autouse=True)
def threads():
    """`load_engine` sets the number of threads of the whole process."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
