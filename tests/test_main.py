"""The command line: settings by name, exit codes, and messages instead of tracebacks."""

import re

import pytest

from sage_unsloth.__main__ import main, parse_settings
from sage_unsloth.models.loading import LoraSettings
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig


@pytest.mark.smoke
def test_settings_have_the_type_of_their_default():
    texts = [
        "max_steps=200",
        "learning_rate=1e-5",
        "temperature=1",
        "rollouts=vllm",
        "load_in_4bit=True",
        "micro_batch_size=4",
        "lora.rank=16",
        "lora.alpha=32",
    ]
    assert parse_settings(texts, RlvrConfig()) == {
        "max_steps": 200,
        "learning_rate": 1e-5,
        "temperature": 1.0,
        "rollouts": "vllm",
        "load_in_4bit": True,
        "micro_batch_size": 4,
        "lora": LoraSettings(rank=16, alpha=32),
    }
    assert parse_settings([], SftConfig()) == {}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps", "takes NAME=VALUE; got 'max_steps'"),
        ("steps=3", "takes one of max_steps, .*; got 'steps'"),
        ("max_steps=many", "max_steps must be a value like 1000; got 'many'"),
        ("max_steps=1.5", "max_steps must be a value like 1000; got 1.5"),
        ("max_steps=True", "must be a value like 1000; got True"),
        ("load_in_4bit=1", "must be a value like False; got 1"),
        ("micro_batch_size=1.5", "must be a value like None"),
        ("lora=3", "takes one of"),
        ("micro_batch_size=True", "must be a value like None; got True"),
    ],
)
def test_bad_settings_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_settings([text], RlvrConfig())


def test_the_algorithms_are_listed(capsys):
    assert main(["train", "--list"]) == 0
    out = capsys.readouterr().out
    for name in ("grpo", "grpo-no-kl", "sage-branch", "dapo-sage-branch"):
        assert re.search(rf"^{name} ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "--algorithm", "sage"], "sage-branch"),
        (["train", "--from", "runs/none", "--algorithm", "grpo"], "a model must be one of"),
        (
            ["train", "--from", "arithmetic-base", "--set", "rollouts=sglang"],
            "rollouts must be one of",
        ),
        (
            ["train", "--from", "arithmetic-base", "--set", "reference=base"],
            "must start from an SFT run",
        ),
        (["train", "--set", "steps=3"], "takes one of"),
        (["sft", "--model", "arithmetic-base", "--path", "none.jsonl"], "there is none at"),
        (["sft", "--model", "arithmetic-base", "--data", "gsm8k"], "data must be one of"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(command, message, tmp_path, capsys):
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
