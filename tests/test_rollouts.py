"""Which engine draws the completions, and that the sampling settings reach it."""

import importlib.util

import pytest
import torch

from sage_unsloth.rollouts import RolloutError, check_calls, choose_rollouts, generation_arguments

NO_VLLM = not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="one of auto, vllm, transformers; got 'sglang'"):
        choose_rollouts("sglang")


@pytest.mark.skipif(not NO_VLLM, reason="vLLM runs here")
def test_falling_back_is_said_aloud_and_insisting_is_refused(caplog):
    caplog.set_level("INFO")
    assert choose_rollouts("auto") == "transformers"
    assert "vLLM is not used because" in caplog.text
    assert choose_rollouts("transformers") == "transformers"
    with pytest.raises(ValueError, match=r"rollouts='vllm' cannot be had: .* 'auto' or"):
        choose_rollouts("vllm")


@pytest.mark.parametrize(
    ("capability", "installed", "run", "reason"),
    [
        ((7, 5), True, {}, "compute capability 8.0; this card has 7.5 .*0.11.2 was the last"),
        ((8, 9), False, {}, "not installed; pip install"),
        ((8, 9), True, {"load_in_4bit": True}, "pip install vllm-bnb-plugin"),
        ((8, 9), True, {"full_finetuning": True}, "full fine-tuning has no adapter"),
        ((8, 9), True, {}, None),
    ],
)
def test_reasons_on_a_machine_with_a_card(monkeypatch, capability, installed, run, reason):
    import re

    from sage_unsloth import rollouts

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if installed else None) if name == "vllm" else find(name),
    )
    found = rollouts.why_no_vllm(**run)
    assert found is None if reason is None else re.search(reason, found)
    assert choose_rollouts("auto", **run) == ("transformers" if found else "vllm")


class Engine:
    """Stands where vLLM's engine stands; it only keeps what it was told."""

    calls = 0

    def generate(self, prompts, sampling_params=None, **kwargs):
        self.calls += 1
        return sampling_params


class Params:
    def __init__(self, **values):
        vars(self).update(values)


def test_settings_that_do_not_reach_the_engine_stop_the_call():
    engine = Engine()
    check_calls(engine, {"temperature": 1.0, "min_p": 0.01})
    right, wrong = Params(temperature=1.0, min_p=0.01), Params(temperature=1.0, min_p=0.0)
    assert engine.generate(["x"], sampling_params=right) is right
    assert engine.generate(["x"], [right, right]) == [right, right]
    for given in (wrong, [right, wrong]):
        with pytest.raises(RolloutError, match=r"told .*'min_p': 0.0.*, expected .*'min_p': 0.01"):
            engine.generate(["x"], sampling_params=given)
    assert engine.calls == 2


def test_trl_calls_the_engine_that_is_checked():
    """Where TRL keeps its engine and how it calls it, as `rlvr` relies on."""
    import inspect

    from trl.generation import vllm_generation

    source = inspect.getsource(vllm_generation.VLLMGeneration)
    assert "self.llm = LLM(" in source
    assert "self.llm.generate(vllm_prompts, sampling_params=sampling_params" in source
    assert "SamplingParams(**generation_kwargs)" in source
    trainer = inspect.getsource(__import__("trl").GRPOTrainer.__init__)
    assert "self.vllm_generation = VLLMGeneration(" in trainer


@pytest.mark.vllm
def test_the_settings_survive_trl_and_become_real_sampling_params():
    """TRL's own code from GRPOConfig's values to vLLM's SamplingParams, on the real packages; only the engine is absent."""
    vllm = pytest.importorskip("vllm")
    arguments = {
        "n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.01,
        "max_tokens": 64, "logprobs": 0,
    }  # fmt: skip
    params = vllm.SamplingParams(**(arguments | generation_arguments("vllm", 7)))
    engine = Engine()
    expected = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.01, "max_tokens": 64, "logit_bias": {7: -100.0}}  # fmt: skip
    check_calls(engine, expected)
    assert engine.generate(["x"], sampling_params=params) is params
