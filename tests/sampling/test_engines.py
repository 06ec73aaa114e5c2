"""Drawing: exact distribution, a stream of one's own, settings."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from table_engine import base_engine

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.problems import arithmetic
from sage_unsloth.sampling import engines, vllm_engine
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.sampling.record_sets import prompt_ids, sample_seed
from sage_unsloth.sampling.token_streams import invert, row_uniforms

CONFIG = SamplingConfig(temperature=1.0, min_p=0.0, max_completion_length=32)


@pytest.fixture(scope="module")
def engine(unsloth_module):
    return base_engine()


def drawn(engine, problems, samples, config=CONFIG):
    """(problem, sample) -> completion, all in one batch."""
    pairs = [(row, sample) for row in problems for sample in samples]
    prompts = [prompt_ids(engine.tokenizer, row["problem"]) for row, _ in pairs]
    seeds = [sample_seed(config.seed, row["id"], sample) for row, sample in pairs]
    return {
        (row["id"], sample): completion
        for (row, sample), completion in zip(
            pairs, engine.draw(prompts, seeds, config), strict=True
        )
    }


def test_inversion_by_hand():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]] * 6)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.9999, 1 - 2**-53], dtype=torch.float64)
    assert invert(probabilities, uniforms).tolist() == [1, 1, 3, 3, 3, 3]


def test_no_rounding_draws_a_token_of_probability_0():
    # Sums that are not 1, and the largest u there is, with nothing but zeros behind.
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(1000, 7, generator=generator) * 1.7
    probabilities[:, 4:] = 0
    uniforms = torch.full((1000,), 1 - 2**-53, dtype=torch.float64)
    assert (invert(probabilities, uniforms) == 3).all()


def test_a_rows_stream_is_its_own():
    several = row_uniforms([3, 5, 3], 10)
    assert several.shape == (3, 10)
    assert (several[0] == several[2]).all() and (several[0] != several[1]).any()
    assert (row_uniforms([5], 4)[0] == several[1, :4]).all()
    assert several[1, 0] == pytest.approx(np.random.Generator(np.random.Philox(5)).random())


def test_each_token_takes_the_next_number_of_its_row():
    draw = engines._Draw(torch.tensor([[0.1, 0.9, 0.3], [0.6, 0.1, 0.9]], dtype=torch.float64), 5)
    steps = [draw(torch.zeros(2, 5 + step), torch.zeros(2, 4)) for step in range(3)]
    assert [scores.argmax(-1).tolist() for scores in steps] == [[0, 2], [3, 0], [1, 3]]
    assert all(torch.isfinite(scores).sum() == 2 for scores in steps)


def test_tokens_follow_the_models_distribution(engine):
    """4,000 tokens at temperature .7 against the model's own probabilities, by chi-squared."""
    config = dataclasses.replace(CONFIG, temperature=0.7, max_completion_length=1)
    ids = engine.tokenizer("17=", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = engine.model(torch.tensor([ids])).logits[0, -1].double()
    logits[engine.tokenizer.pad_token_id] = -torch.inf
    expected = 4000 * torch.softmax(logits / 0.7, -1)
    texts = [c.text for c in engine.draw([ids] * 4000, range(4000), config)]
    likely = [token for token in range(len(expected)) if expected[token] >= 5]
    assert len(likely) >= 5
    chi = sum(
        (texts.count(engine.tokenizer.decode([token])) - float(expected[token])) ** 2
        / float(expected[token])
        for token in likely
    )
    assert chi < 3 * len(likely) + 15  # far above the 99.9 % quantile of so many degrees


def test_a_completion_does_not_depend_on_its_batch(engine):
    """Alone, or among others of other lengths: equal texts up to rare rounding, which is measured
    in the benchmark.
    """
    rows = arithmetic.problems("test")[:3]
    longer = rows[0] | {"id": "longer", "problem": "What is, please, " + rows[0]["problem"]}
    together = drawn(engine, [*rows, longer], range(8))
    alone = [drawn(engine, [row], [sample]) for row in rows for sample in range(0, 8, 2)]
    differ = sum(together[key] != one[key] for one in alone for key in one)
    assert differ <= 1
    assert len({c.text for c in together.values()}) > 20


def test_min_p_top_k_and_top_p_leave_out_what_they_should(engine):
    row = arithmetic.problems("test")[0]
    greedy = {
        c.text
        for c in drawn(engine, [row], range(20), dataclasses.replace(CONFIG, top_k=1)).values()
    }
    assert len(greedy) == 1
    for settings in ({"min_p": 0.999}, {"top_p": 1e-6}, {"temperature": 0.001}):
        config = dataclasses.replace(CONFIG, **settings)
        assert {c.text for c in drawn(engine, [row], range(20), config).values()} == greedy


def test_a_models_own_generation_config_has_no_say(engine, monkeypatch):
    rows = arithmetic.problems("test")[:2]
    before = drawn(engine, rows, range(4))
    own = engine.model.generation_config
    for name, value in {
        "repetition_penalty": 5.0,
        "temperature": 0.01,
        "min_new_tokens": 30,
        "num_beams": 2,
    }.items():
        monkeypatch.setattr(own, name, value)
    assert drawn(engine, rows, range(4)) == before


def test_completions_end_at_eos_or_at_the_limit(engine):
    completions = drawn(engine, arithmetic.problems("test")[:4], range(16)).values()
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        assert (completion.finish_reason == "stop") or completion.num_tokens == 32
        assert engine.tokenizer.eos_token not in completion.text
        assert engine.tokenizer.pad_token not in completion.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, r"temperature must be > 0 .* got 0. Use .01"),
        ({"num_samples": 0}, "num_samples must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"min_p": 1.0}, "min_p=1.0"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)


def test_the_defaults_are_the_papers_evaluation():
    config = SamplingConfig()
    assert (config.num_samples, config.temperature, config.top_p, config.top_k, config.min_p) == (
        256,
        0.3,
        1.0,
        -1,
        0.01,
    )


class BarReadingLlm:
    """`LLM.generate` of vLLM 0.32 as far as bars go: one around the requests, one over those that
    end, whose count, text and elapsed time are read.
    """

    def generate(self, prompts, parameters, *, use_tqdm, lora_request):
        assert list(use_tqdm(prompts, desc="Adding requests")) == prompts
        bar = use_tqdm(
            total=len(prompts), desc="Processed prompts", dynamic_ncols=True, postfix="0 toks/s"
        )
        for _ in prompts:
            bar.postfix = f"{7 / bar.format_dict['elapsed']:.0f} toks/s"
            bar.update(1)
            if bar.n == len(prompts):
                bar.refresh()
        bar.close()
        token = SimpleNamespace(token_ids=[5, 6])
        return [SimpleNamespace(outputs=[token]) for _ in prompts]


def test_the_bar_moves_during_a_call_of_vllm(monkeypatch, capsys):
    tokenizer = load_tokenizer(data_folder() / BASE_MODEL)
    monkeypatch.setattr(vllm_engine, "request_parameters", lambda *_: None)
    engine = vllm_engine.VllmEngine.from_llm(BarReadingLlm(), tokenizer, [0])
    told = []
    config = dataclasses.replace(CONFIG, batch_size=3)
    drawn = engine.stream([([1, 2], seed) for seed in range(4)], config, told.append)
    assert next(drawn)[0] == 0 and told == [1, 1, 1], "before the call's completions come"
    assert [number for number, _ in drawn] == [1, 2, 3] and told == [1] * 4
    assert not "".join(capsys.readouterr()), "its own bars are not shown"
