"""Which engine draws the completions, and that the sampling settings reach it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from sage_unsloth.sampling.engine_choice import (
    RolloutError,
    check_calls,
    choose_rollouts,
    generation_arguments,
)

NO_VLLM = not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="one of auto, vllm, transformers, got 'sglang'"):
        choose_rollouts("sglang")


@pytest.mark.skipif(not NO_VLLM, reason="vLLM runs here")
def test_falling_back_is_said_aloud_and_insisting_is_refused(caplog):
    caplog.set_level("INFO")
    assert choose_rollouts("auto") == "transformers"
    assert "vLLM is not used because" in caplog.text
    assert choose_rollouts("transformers") == "transformers"
    with pytest.raises(ValueError, match=r"rollouts='vllm' is not available: .* 'auto' or"):
        choose_rollouts("vllm")


@pytest.mark.parametrize(
    ("capability", "installed", "run", "reason"),
    [
        ((7, 5), True, {}, "compute capability 8.0, but this GPU has 7.5 .*0.11.2 was the last"),
        ((8, 9), False, {}, r"not installed .pip install"),
        ((8, 9), True, {"load_in_4bit": True}, "pip install vllm-bnb-plugin"),
        ((8, 9), True, {"full_finetuning": True}, "full fine-tuning has no adapter"),
        ((8, 9), True, {}, None),
    ],
)
def test_reasons_on_a_machine_with_a_card(monkeypatch, capability, installed, run, reason):
    import re

    from sage_unsloth.sampling import engine_choice as rollouts

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    find = importlib.util.find_spec
    here = {"vllm": object() if installed else None, "vllm_bnb_plugin": None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: here[name] if name in here else find(name),
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
        with pytest.raises(RolloutError, match=r"got .*'min_p': 0.0.*, expected .*'min_p': 0.01"):
            engine.generate(["x"], sampling_params=given)
    assert engine.calls == 2


class Reached(Exception):
    """The engine was called with what it should be told."""


class LastEngine:
    """At the end of TRL's path to vLLM; keeps the parameters."""

    def generate(self, prompts, sampling_params=None, **kwargs):
        raise Reached(sampling_params)


def through_trl(params_class, monkeypatch, **changes):
    """TRL's own `VLLMGeneration.generate` up to the engine, with what `rlvr` puts into GRPOConfig;
    the engine is checked.
    """
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "SamplingParams", params_class, raising=False)
    generation = vllm_generation.VLLMGeneration.__new__(vllm_generation.VLLMGeneration)
    settings = dict(
        accelerator=None,
        model=torch.nn.Module(),
        mode="colocate",
        temperature=0.9,
        top_p=0.95,
        top_k=-1,
        min_p=0.01,
        repetition_penalty=1.0,
        max_completion_length=64,
        logprobs=0,
        structured_outputs_regex=None,
        tensor_parallel_size=1,
        enable_sleep_mode=False,
        generation_kwargs=generation_arguments("vllm", 7),
        llm=LastEngine(),
    )
    vars(generation).update(settings | changes)
    expected = {
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.01,
        "max_tokens": 64,
        "logit_bias": {7: -100.0},
    }
    check_calls(generation.llm, expected)
    generation.generate(prompts=[[1, 2, 3]], images=None, num_generations=1)


def test_the_settings_reach_the_engine_through_trl(monkeypatch):
    with pytest.raises(Reached):
        through_trl(Params, monkeypatch)


@pytest.mark.parametrize(
    "lost", [dict(min_p=None), dict(temperature=1.0), dict(top_p=1.0), dict(generation_kwargs={})]
)
def test_a_setting_that_is_lost_on_the_way_is_refused(monkeypatch, lost):
    with pytest.raises(RolloutError, match="must sample as configured"):
        through_trl(Params, monkeypatch, **lost)


@pytest.mark.vllm
def test_they_become_real_sampling_params(monkeypatch):
    vllm = pytest.importorskip("vllm")
    with pytest.raises(Reached) as reached:
        through_trl(vllm.SamplingParams, monkeypatch)
    assert isinstance(reached.value.args[0], vllm.SamplingParams)


def test_the_trainer_keeps_its_engine_where_rlvr_looks_for_it():
    """Of the files, since importing Unsloth puts classes of its own in their place."""
    sources = {
        name: Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
        for name in ("trl.generation.vllm_generation", "trl.trainer.grpo_trainer")
    }
    assert "self.llm = LLM(" in sources["trl.generation.vllm_generation"]
    assert "self.vllm_generation = VLLMGeneration(" in sources["trl.trainer.grpo_trainer"]
