"""Unsloth's environment variables: what is set, and what a caller has set is kept."""

import os
import sys
import types

import pytest

from sage_unsloth.trainers import switches


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """None of Unsloth's own, and as before afterwards."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNSLOTH_")}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def test_without_a_gpu_packing_and_compilation_are_off(environment):
    switches.run_without_gpu()
    found = {name: value for name, value in environment.items() if name.startswith("UNSLOTH_")}
    assert found == {
        "UNSLOTH_ALLOW_CPU": "1",
        "UNSLOTH_GRPO_SEQ_PACKING": "0",
        "UNSLOTH_COMPILE_DISABLE": "1",
    }
    assert not switches.compilation_is_on()


def test_a_caller_may_compile(environment):
    environment["UNSLOTH_COMPILE_DISABLE"] = "0"
    switches.run_without_gpu()
    assert switches.compilation_is_on()


def test_standby_is_for_an_unsloth_that_is_not_imported_yet(environment, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    switches.use_standby()
    assert "imported without standby" in caplog.text and "UNSLOTH_VLLM_STANDBY" not in environment
    monkeypatch.delitem(sys.modules, "unsloth")
    switches.use_standby()
    assert environment["UNSLOTH_VLLM_STANDBY"] == "1"


def test_memory_share_recomputation_and_rejection(environment):
    switches.keep_vllm_memory_share()
    assert environment["UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"] == "1"
    for on, value in ((True, "1"), (False, "0")):
        switches.recompute_logits(on)
        assert environment["UNSLOTH_GRPO_LOGPROB_RECOMPUTE"] == value
    assert switches.rollout_rejection() is None
    environment["UNSLOTH_GRPO_ROLLOUT_RS"] = "token"
    assert switches.rollout_rejection() == "token"


def test_training_in_float32_turns_autocast_off(environment):
    switches.train_in_float32()
    assert environment == environment | {"UNSLOTH_MIXED_PRECISION": "bfloat16"}
