"""A rollout that writes into the policy stops the run; what an engine is given is a copy."""

import sys
import types

import pytest
import torch

from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.trainers.replaced import replaced
from sage_unsloth.trainers.rollout_weights import ChangedWeightsError, digest, keep_trained_weights
from sage_unsloth.trainers.trainer_names import LORA_REQUEST, ContractError


def adapter(trainer, part="lora_B"):
    return {n: p for n, p in trainer.model.named_parameters() if part in n}


def writing(trainer, write):
    """`_generate` of the trainer, after which `write` has been called, as an engine writes."""
    generate = trainer._generate

    def generated(*args, **kwargs):
        result = generate(*args, **kwargs)
        with torch.inference_mode():
            write()
        return result

    return replaced(trainer, _generate=generated)


@pytest.mark.smoke
@pytest.mark.parametrize("guide", [BranchGuide(), None])
def test_a_rollout_that_scales_the_adapter_stops_the_run(make_trainer, guide):
    trainer = make_trainer(max_steps=2)
    name, weight = next(iter(adapter(trainer).items()))
    message = rf"of step 1 changed 1 of 12, the first is {name} .*alpha / r in place"
    with (
        pytest.raises(ChangedWeightsError, match=message),
        guided_kl(trainer, guide),
        writing(trainer, lambda: weight.detach().mul_(2.0)),
    ):
        trainer.train()
    assert trainer.state.global_step == 0
    assert "_generate_and_score_completions" not in vars(trainer)


def test_a_later_rollout_and_one_of_an_evaluation_are_watched(make_trainer):
    trainer = make_trainer(max_steps=3, per_device_eval_batch_size=8)
    weight = next(iter(adapter(trainer, "lora_A").values()))

    def late():
        if trainer.state.global_step == 1:
            weight.data[0, 0] += 1e-3  # not counted by PyTorch as a write

    with (
        pytest.raises(ChangedWeightsError, match="of step 2 changed 1 of 12"),
        guided_kl(trainer, BranchGuide()),
        writing(trainer, late),
    ):
        trainer.train()
    with (
        pytest.raises(ChangedWeightsError, match="changed 12 of 12"),
        guided_kl(trainer, BranchGuide()),
        writing(trainer, lambda: [w.data.mul_(1.5) for w in adapter(trainer, "lora_").values()]),
    ):
        trainer.evaluate(trainer.train_dataset.select(range(8)))


def test_frozen_weights_may_change_and_steps_are_no_rollouts(make_trainer):
    """Unsloth folds the adapter into the base weights for some rollouts, and out again."""
    trainer = make_trainer(max_steps=2)
    base = trainer.model.get_input_embeddings().weight
    with guided_kl(trainer, None), writing(trainer, lambda: base.detach().add_(0.0)):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_digest_is_the_sum_of_the_bits(dtype):
    weights = {"a": torch.randn(7, 5, dtype=dtype).t(), "b": torch.ones(3, dtype=dtype)}
    found = digest(weights)
    one = {2: {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}.get(dtype), 4: 0x3F800000}
    one[8] = 0x3FF0000000000000
    size = weights["b"].element_size()
    assert found["b"] == (3 * one[size] + 2**63) % 2**64 - 2**63
    assert digest(weights) == found
    for change in (lambda w: w.mul_(2), lambda w: w.mul_(0.9), lambda w: w[1, 2].mul_(1.01)):
        other = {"a": weights["a"].clone(), "b": weights["b"]}
        change(other["a"])
        assert digest(other)["a"] != found["a"] and digest(other)["b"] == found["b"]
    assert digest({}) == {}


# --- What Unsloth's own `load_lora` makes for vLLM ---


@pytest.fixture
def shared_engine(make_trainer, monkeypatch, tmp_path):
    """A trainer as it is with an engine of Unsloth's. Its requests are made by Unsloth; of vLLM,
    which need not be installed, only the request's class is looked up, and that is Unsloth's too.
    """
    from unsloth_zoo import vllm_lora_request, vllm_utils

    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = vllm_lora_request.LoRARequest
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setattr(vllm_utils, "LORA_REQUEST_ID", 1, raising=False)  # `patch_vllm` sets it
    trainer = make_trainer()

    def load_lora():
        return vllm_utils.load_lora(trainer.model, str(tmp_path / "lora"), load_tensors=True)

    trainer.vllm_generation = types.SimpleNamespace(_unsloth_load_lora=load_lora)
    return trainer, load_lora


def shared(trainer, request):
    """The weights that a request shares memory with."""
    places = {t.data_ptr() for t in request.lora_tensors.values()}
    return [n for n, p in trainer.model.named_parameters() if p.data_ptr() in places]


def test_the_engine_is_given_copies(shared_engine):
    trainer, load_lora = shared_engine
    live = load_lora()
    assert shared(trainer, live) == list(adapter(trainer, "lora_"))  # the defect itself
    with guided_kl(trainer, None):
        first, second = load_lora(), load_lora()
    assert shared(trainer, first) == shared(trainer, second) == []
    for name, tensor in live.lora_tensors.items():
        assert torch.equal(first.lora_tensors[name], tensor)
        assert not first.lora_tensors[name].is_inference()
        first.lora_tensors[name].mul_(2)
        assert torch.equal(second.lora_tensors[name], tensor)
    assert shared(trainer, load_lora()) == list(adapter(trainer, "lora_"))


def test_requests_that_are_made_in_another_way_are_refused(shared_engine, monkeypatch):
    from unsloth_zoo import vllm_utils

    trainer, _ = shared_engine
    for other in (None, lambda model, request_id: None):
        monkeypatch.setattr(vllm_utils, LORA_REQUEST, other)
        with (
            pytest.raises(ContractError, match=f"adapter requests by {LORA_REQUEST}"),
            keep_trained_weights(trainer),
        ):
            pass
