"""4-bit weights on a CPU: what they stand for, what a pass computes with them, what a merge
leaves.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.models.merging import save_merged
from sage_unsloth.models.quantised import dequantise, is_quantised

BASE = data_folder() / BASE_MODEL
IDS = torch.randint(5, 300, (2, 24), generator=torch.Generator().manual_seed(1))
# Of NF4, the levels that lie furthest apart are -1 and -0.6962.
HALF_A_GAP = (1 - 0.6962) / 2


@pytest.fixture(scope="module")
def plain(unsloth_module):
    return load_policy(BASE)[0]


@pytest.fixture(scope="module")
def saved(unsloth_module, tmp_path_factory):
    """An adapter that is not zero, on disk; and the policy in 4 bits that it was made on."""
    model, tokenizer = load_policy(BASE, lora=LoraSettings(), load_in_4bit=True)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("four-bits") / "adapter"
    model.save_pretrained(folder)
    return folder, model, tokenizer


def logps(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits.double().log_softmax(-1)


def kl(one, other):
    """Mean KL(one ‖ other) of two models' next tokens, nats."""
    p, q = logps(one), logps(other)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def gradients(model):
    model.zero_grad()
    found = model(input_ids=IDS).logits.log_softmax(-1)
    found.gather(-1, IDS[..., None]).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_the_linear_layers_of_all_blocks_are_quantised_and_nothing_else(plain, saved):
    _, model, _ = saved
    before = dict(plain.named_parameters())
    count = 0
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" in name:
            assert parameter.dtype == torch.float32
            continue
        name = name.replace(".base_layer", "")
        weight, values = before[name], dequantise(parameter)
        if weight.dim() == 1 or "embed_tokens" in name or "lm_head" in name:
            assert torch.equal(values, weight), name
            continue
        count += 1
        assert parameter.dtype == torch.uint8 and parameter.numel() == weight.numel() // 2
        assert values.shape == weight.shape and not torch.equal(values, weight)
        blocks = weight.reshape(-1, 64).abs().amax(1, keepdim=True)
        error = (values - weight).reshape(-1, 64).abs()
        # The scales are rounded too, to 8 bits of their own spread.
        assert (error <= HALF_A_GAP * blocks + blocks.max() / 127).all(), name
    assert count == 7 * plain.config.num_hidden_layers


def test_a_pass_without_gradients_changes_neither_policy_nor_gradient(saved):
    """As bitsandbytes does on a CPU with AVX512-BF16: there sampling would turn every later product
    to bfloat16, and cut its gradient off.
    """
    _, model, _ = saved
    model.train()
    before, first = gradients(model), logps(model)
    model.eval()
    sampled = logps(model)
    model.train()
    after = gradients(model)
    assert torch.equal(sampled, first)
    assert before.keys() == after.keys() and len(before) > 10
    assert all(torch.equal(after[name], before[name]) for name in before)
    layers = [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_a_merge_is_the_policy_that_was_trained(saved, plain, tmp_path):
    folder, policy, tokenizer = saved
    model, _ = load_policy(BASE, adapter=folder, load_in_4bit=True)
    assert torch.equal(logps(model), logps(policy.eval()))
    save_merged(model, tokenizer, tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    merged = load_policy(tmp_path / "merged")[0]
    assert not is_quantised(merged)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    # Rounding of float32 alone, against what the quantisation of the base amounts to.
    assert (logps(merged) - logps(policy)).abs().max() < 1e-3
    assert kl(policy, merged) < 1e-8
    other = load_policy(BASE, adapter=folder)[0]
    assert kl(policy, other) > 1e-3
    with pytest.raises(ValueError, match=r"must not be quantised again.*merged"):
        load_policy(tmp_path / "merged", load_in_4bit=True)


def test_a_merge_has_the_format_of_its_base(saved, tmp_path):
    """The adapter's own is float32."""
    folder, _, tokenizer = saved
    model, _ = load_policy(BASE, adapter=folder, load_in_4bit=True, dtype="bfloat16")
    save_merged(model, tokenizer, tmp_path / "merged")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_a_model_without_an_adapter_is_merged_too(unsloth_module, tmp_path):
    model, tokenizer = load_policy(BASE, load_in_4bit=True)
    expected = logps(model)
    save_merged(model, tokenizer, tmp_path / "model", dtype="bfloat16")
    loaded = load_policy(tmp_path / "model")[0]
    assert not is_quantised(loaded)
    weight = dict(loaded.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight, weight.bfloat16().float()), "saved in bfloat16"
    assert (logps(loaded).exp() - expected.exp()).abs().max() < 0.05
