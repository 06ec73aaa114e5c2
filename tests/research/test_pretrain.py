"""Pretraining: what a base starts from, and what a batch of each corpus teaches."""

import random

import pytest
import torch
from safetensors.torch import load_file

from research.pretrain import CORPORA, PretrainConfig, batch, build_model, train
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.problems import arithmetic


def test_a_base_goes_on_from_another_or_from_nothing():
    tokenizer, start = arithmetic.build_tokenizer(), data_folder() / BASE_MODEL
    weights = load_file(start / "model.safetensors")
    model = build_model(PretrainConfig(start=str(start)), tokenizer).state_dict()
    assert all(torch.equal(model[name], value.float()) for name, value in weights.items())
    new = build_model(PretrainConfig(), tokenizer).state_dict()
    name = "model.embed_tokens.weight"
    assert new[name].shape == weights[name].shape and not torch.equal(new[name], weights[name])


@pytest.mark.parametrize("problems", CORPORA)
def test_a_batch_teaches_the_text_behind_the_prompt(problems):
    tokenizer = arithmetic.build_tokenizer()
    input_ids, labels = batch(tokenizer, random.Random(0), 16, CORPORA[problems])
    for ids, learnt in zip(input_ids, labels, strict=True):
        kept = learnt != -100
        assert torch.equal(ids[kept], learnt[kept])
        assert tokenizer.decode(ids[kept]).endswith(arithmetic.EOS)
        assert "You are given a problem" not in tokenizer.decode(ids[kept])
    assert any("You are given a problem" in tokenizer.decode(ids) for ids in input_ids)


def test_a_countdown_base_learns_from_its_start():
    tokenizer = arithmetic.build_tokenizer()
    config = PretrainConfig(
        problems="countdown", start=str(data_folder() / BASE_MODEL), steps=2, batch_size=2
    )
    before = build_model(config, tokenizer).state_dict()
    after = train(config, tokenizer).state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
