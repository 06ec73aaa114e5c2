"""The estimate of an evaluation's time: by the completions' own lengths, and by hand."""

import re
import time

import pytest

from sage_unsloth.evaluation.evaluator import parse_benchmark
from sage_unsloth.evaluation.pace import PROBE_TOKENS, estimate, stretch
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.sampling.engines import Completion, SamplingConfig


class Clockwork:
    """An engine that takes .002 s for each token of a batch's longest completion."""

    name = "transformers"
    fills_places = False

    def __init__(self, lengths):
        self.tokenizer = load_tokenizer(data_folder() / BASE_MODEL)
        self.lengths, self.batches = lengths, []

    def draw(self, prompts, seeds, config):
        limit = config.max_completion_length
        lengths = [self.lengths[i % len(self.lengths)] for i in range(len(prompts))]
        drawn = [min(length, limit) for length in lengths]
        self.batches.append(len(prompts))
        time.sleep(0.002 * (max(drawn) + 1))
        return [
            Completion("x", n, "stop" if n == length else "length")
            for n, length in zip(drawn, lengths, strict=True)
        ]


def minutes(engine, missing, **settings):
    config = SamplingConfig(max_completion_length=1024, **settings)
    text = estimate(engine, parse_benchmark("arithmetic"), config, missing)
    return float(re.match(r"Estimate: ([\d.]+) min", text)[1]), text


@pytest.mark.smoke
def test_completions_that_end_early_are_not_taken_for_the_longest_allowed():
    engine = Clockwork([25, 49])
    # 100 batches of 64, of 50 steps each: 10 s; with all 1,024 tokens it would be 3.4 min.
    found, text = minutes(engine, 6400)
    assert found == pytest.approx(10 / 60, abs=0.06)
    assert engine.batches == [1, 64] and "a probe of 64, 37 tokens each)" in text


def test_a_completion_without_an_end_counts_with_all_tokens():
    # The probe stops after 256 of 1,024 steps; 100 batches would take 1,025 each.
    found, text = minutes(Clockwork([25, 5000]), 6400)
    assert found == pytest.approx(100 * 1025 * 0.002 / 60, rel=0.1)
    assert "32 of them not at an end" in text


def test_the_probe_is_a_small_part_of_what_is_missing():
    engine = Clockwork([25])
    minutes(engine, 20)
    assert engine.batches == [1, 3]


def test_stretch_by_hand():
    drawn = [Completion("", 9, "stop"), Completion("", PROBE_TOKENS, "length")]
    config = SamplingConfig(max_completion_length=1024)
    assert stretch(drawn, config, False) == pytest.approx(1025 / 257)
    assert stretch(drawn, config, True) == pytest.approx((10 + 1025) / (10 + 257))
    assert stretch(drawn[:1], config, False) == 1
