"""The oracle is right: its model is transformers' Qwen2, its loss the formula, its terms a sum."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sage_unsloth.objective.loss import grpo_loss
from sage_unsloth.selftest.decoder import Decoder, decoder_of, plain_name, shape_of
from sage_unsloth.selftest.oracle import branch_guide, expected_step, loss_terms

GUIDE = {"ratio": 0.3, "threshold": 1.2, "q_min": 0.6, "q_max": 1.4}


@pytest.fixture
def peft_model():
    from conftest import tiny_model

    return tiny_model(0.05).double()


@pytest.mark.smoke
@pytest.mark.parametrize("adapted", [True, False])
def test_the_decoder_is_transformers_qwen2_with_pefts_adapter(peft_model, adapted):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if name.endswith("bias"):  # fresh ones are 0
            parameter.data = torch.randn(parameter.shape, generator=generator).double()
    ids = torch.randint(2, 39, (11,), generator=generator)
    with torch.no_grad():
        if adapted:
            expected = peft_model(input_ids=ids[None]).logits[0]
        else:
            with peft_model.disable_adapter():
                expected = peft_model(input_ids=ids[None]).logits[0]
        found = decoder_of(peft_model).logits(ids, adapted=adapted)
    # transformers takes RoPE's angles in float32.
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_base_of_rope_is_read_from_older_configurations_too(peft_model):
    shape, settings = shape_of(peft_model.config), peft_model.config.to_dict()
    older = SimpleNamespace(**(settings | {"rope_parameters": None, "rope_theta": 5e5}))
    assert shape_of(older) == replace(shape, rope_theta=5e5)


def test_another_family_is_refused(peft_model):
    peft_model.config.model_type = "llama"
    with pytest.raises(ValueError, match="model_type='llama'"):
        shape_of(peft_model.config)


def test_names_lose_what_peft_wraps():
    layer = "base_model.model.model.layers.0.self_attn.q_proj."
    assert plain_name(layer + "base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert plain_name(layer + "lora_A.default.weight") == "model.layers.0.self_attn.q_proj.lora_A"
    assert plain_name("base_model.model.lm_head.weight") == "lm_head.weight"


def test_the_guide_by_hand():
    found = branch_guide(torch.tensor([0.0, 1.2, 2.2, 9.0], dtype=torch.float64), **GUIDE)
    assert found.tolist() == pytest.approx([0, 0, math.log(1.3), math.log(1.4)])


def test_the_loss_by_hand():
    """Two completions, of one token and of two; the second policy token has ratio 1.5, clipped."""
    logps = torch.tensor([[-1.0, 0.0], [-2.0, -1.0]]).double()
    old = torch.tensor([[-1.0, 0.0], [-2.0 - math.log(1.5), -1.0]]).double()
    ref = torch.tensor([[-1.5, 0.0], [-2.0, -1.2]]).double()
    log_guide = torch.tensor([[math.log(1.3), 0.0], [0.0, 0.0]]).double()
    found = loss_terms(
        logps,
        ref,
        log_guide,
        [1, 2],
        torch.tensor([2.0, 1.0]),
        beta=0.5,
        epsilon=0.2,
        old_logps=old,
    )
    assert found["advantage"].item() == pytest.approx(-(2.0 + (1.2 + 1.0) / 2) / 2)
    k3 = [math.exp(-0.5) + 0.5 - 1, (math.exp(-0.2) + 0.2 - 1) / 2]
    assert found["kl"].item() == pytest.approx(0.5 * sum(k3) / 2)
    d = -0.5 + math.log(1.3)
    guided = math.exp(d) - d - 1
    assert found["guide"].item() == pytest.approx(0.5 * (guided - k3[0]) / 2)


def test_what_unsloth_bounds_is_refused():
    ones = torch.ones(1, 1).double()
    with pytest.raises(ValueError, match=r"at most 2\.5 nats at each token.*got 3\.0"):
        loss_terms(-3 * ones, 0 * ones, 0 * ones, [1], torch.ones(1), beta=0.1, epsilon=0.2)


def test_the_loss_and_its_gradient_are_those_of_the_packages_plain_loss():
    generator = torch.Generator().manual_seed(2)
    shape, lengths = (4, 6), [6, 3, 1, 5]
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    logps = -2 + 0.5 * torch.randn(shape, generator=generator).double()
    old, ref = (logps + 0.2 * torch.randn(shape, generator=generator) for _ in range(2))
    log_guide = 0.2 * torch.rand(shape, generator=generator).double()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5]).double()
    ours, theirs = (logps.clone().requires_grad_() for _ in range(2))
    terms = loss_terms(
        ours, ref, log_guide, lengths, advantages, beta=0.3, epsilon=0.1, old_logps=old
    )
    plain = grpo_loss(
        theirs,
        ref,
        mask,
        advantages,
        old_per_token_logps=old,
        log_guide=log_guide,
        beta=0.3,
        epsilon=0.1,
        epsilon_high=0.1,
    )
    sum(terms.values()).backward()
    plain.backward()
    assert sum(terms.values()).item() == pytest.approx(plain.item(), rel=1e-12)
    assert (ours.grad - theirs.grad).abs().max() < 1e-14


@pytest.mark.parametrize("number_format", ["float16", "bfloat16"])
def test_a_format_of_16_bits_is_as_far_off_as_its_rounding(peft_model, number_format):
    """The yardstick of both: a gradient that falls below float16's range would show here."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 39, (4, 20), generator=generator)
    batch = {
        "prompt_ids": ids[:, :4],
        "prompt_mask": torch.ones(4, 4, dtype=torch.long),
        "completion_ids": ids[:, 4:],
        "completion_mask": torch.ones(4, 16, dtype=torch.long),
        "advantages": torch.tensor([1e-3, -1e-3, 1e-3, -1e-3]),
    }
    settings = dict(guide=GUIDE, source="policy", beta=1e-3, epsilon=0.2)
    exact = expected_step(decoder_of(peft_model), batch, **settings).total
    dtype = getattr(torch, number_format)
    rounded = expected_step(decoder_of(peft_model, dtype=dtype), batch, **settings).total
    errors = [((rounded[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact]
    rounding = torch.finfo(dtype).eps / 2
    assert rounding / 4 < max(errors) < 64 * rounding


def test_the_scale_of_the_adapter_is_alpha_over_r(peft_model):
    assert isinstance(decoder_of(peft_model), Decoder) and decoder_of(peft_model).scale == 2.0
