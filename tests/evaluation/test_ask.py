"""The command `ask`: what it prints, greedy and sampled, and what it refuses."""

import io

import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.ask import open_model, sample_answers
from sage_unsloth.evaluation.named_models import parse_model
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.sampling.engines import SamplingConfig

BASE = str(data_folder() / BASE_MODEL)
GREEDY = SamplingConfig(
    num_samples=1, temperature=1.0, top_k=1, min_p=0.0, max_completion_length=48
)


@pytest.fixture(scope="module")
def opened(unsloth_module):
    with open_model(parse_model(f"model={BASE}")) as (engine, prompt):
        yield engine, prompt


def test_a_greedy_answer_takes_the_likeliest_token_each_time(opened):
    import torch

    from sage_unsloth.sampling.record_sets import prompt_ids

    engine, _ = opened
    (completion,) = sample_answers(engine, "64*6=?", GREEDY)
    (again,) = sample_answers(engine, "64*6=?", GREEDY, seed=1)
    assert completion == again and completion.num_tokens > 10
    ids = [*prompt_ids(engine.tokenizer, "64*6=?"), *completion.token_ids]
    with torch.inference_mode():
        logits = engine.model(torch.tensor([ids])).logits[0]
    likeliest = logits[-len(completion.token_ids) - 1 : -1].argmax(-1).tolist()
    assert likeliest == [*completion.token_ids]


def test_sampled_answers_differ_and_their_seed_brings_them_back(opened):
    engine, _ = opened
    config = SamplingConfig(num_samples=4, temperature=1.0, min_p=0.0, max_completion_length=48)
    first = sample_answers(engine, "64*6=?", config)
    assert len({completion.text for completion in first}) > 1
    assert sample_answers(engine, "64*6=?", config)[:2] == first[:2]
    assert sample_answers(engine, "64*6=?", config, seed=2)[0] != first[0]


def test_each_line_of_standard_input_is_a_question(unsloth_module, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("64*6=?\n\n12+5=?\n"))
    assert main(["ask", "--model", BASE, "--max-tokens", "48"]) == 0
    text = capsys.readouterr().out
    assert text.count("answer: ") == 2 and text.count(" tokens, ") == 2
    assert "<SOLUTION>" in text


def test_what_is_cut_or_has_no_answer_is_named(unsloth_module, capsys):
    command = ["ask", "--model", BASE, "64*6=?", "--n", "2", "--temperature", "1"]
    assert main([*command, "--max-tokens", "4"]) == 0
    text = capsys.readouterr().out
    assert text.count("answer: none in the trained format") == 2
    assert text.count("truncated after 4 tokens: raise --max-tokens") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "3"], "greedy answers are all the same, got n=3"),
        (["--temperature", "0"], "temperature must be > 0"),
        (["--model", "no/such/folder"], "there is no folder no/such/folder"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(options, message, capsys):
    assert main(["ask", "--model", BASE, "1+1=?", *options]) == 2
    assert message in capsys.readouterr().err
