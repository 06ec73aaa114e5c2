"""Stage 2 by TRL's own trainer, in processes in which Unsloth is not installed: alone, in two
processes by accelerate's configuration files, and beside Unsloth.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from sage_unsloth.runs.files import read_json, read_jsonl
from sage_unsloth.runs.record import open_run, refuse_other_settings
from sage_unsloth.sampling.engine_choice import RolloutError
from sage_unsloth.sampling.server_calls import check_requests
from sage_unsloth.trainers import backends
from sage_unsloth.training.by_trl import check_trl_config, keep_base_as_reference
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_config import SftConfig
from sage_unsloth.training.stage import run_settings

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "fixed_rollouts.py"
CONFIGURATIONS = ROOT / "docs" / "accelerate"
OF_THE_CLOCK = ("seconds", "step_time")
DEFINED_OTHERWISE = {"kl", "entropy", "completion_length"}
"""TRL's mean over tokens, its own metric, and Unsloth's own."""


def started(*command):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=environment,
    )
    return done


def trained(folder, *settings, by=()):
    """The adapter and the metrics of a run in a process, or in those that `by` launches."""
    done = started(*by, WORKER, folder, "max_steps=3", *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(folder / "adapter" / "adapter_model.safetensors"), read_jsonl(
        folder / "metrics.jsonl"
    )


def two_processes(configuration):
    return (
        *("-m", "accelerate.commands.launch", "--config_file", CONFIGURATIONS / configuration),
        *("--num_processes", "2", "--main_process_port", "0"),
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A whole run in one process: its folder, adapter and metrics."""
    folder = tmp_path_factory.mktemp("trl") / "whole"
    return folder, *trained(folder)


def check_same(found, expected, within):
    weights, rows = found
    assert weights.keys() == expected[0].keys()
    assert max(w.abs().max() for name, w in weights.items() if "lora_B" in name) > 1e-3
    for name, weight in expected[0].items():
        assert (weights[name] - weight).abs().max() <= within, name
    assert len(rows) == len(expected[1]) == 3
    for row, other in zip(rows, expected[1], strict=True):
        for name in (row.keys() & other.keys()) - DEFINED_OTHERWISE - {*OF_THE_CLOCK}:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name


def test_a_record_says_how_many_processes_and_what_splits_the_model(monkeypatch):
    base = ROOT / "data" / "arithmetic-base"
    assert not {"processes", "sharded_by"} & run_settings("rlvr", RlvrConfig(), base, []).keys()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    settings = run_settings("rlvr", RlvrConfig(), base, [])
    assert (settings["processes"], settings["sharded_by"]) == (2, "FSDP")
    with pytest.raises(ValueError, match="SFT runs in one process, got WORLD_SIZE=2"):
        run_settings("sft", SftConfig(), base, [])


@pytest.mark.long
def test_unsloth_trains_the_same_weights_on_the_same_completions(alone, tmp_path):
    _, weights, rows = alone
    found = trained(tmp_path / "run", "backend=unsloth")
    check_same(found, (weights, rows), within=1e-5)
    assert {"sage/guide_mean", "kl/ref_k3", "kl/anchor_k3", "reward/half"} <= rows[0].keys()
    for row, other in zip(found[1], rows, strict=True):
        assert row.keys() ^ other.keys() <= DEFINED_OTHERWISE


@pytest.mark.long
@pytest.mark.parametrize(("configuration", "kind"), [("ddp.yaml", None), ("fsdp2.yaml", "FSDP")])
def test_two_processes_train_as_one(alone, tmp_path, configuration, kind):
    """Stopped in the second step, and resumed from the checkpoint of both."""
    _, weights, rows = alone
    folder = tmp_path / "run"
    found = trained(folder, "stop=2", "resume=yes", by=two_processes(configuration))
    check_same(found, (weights, rows), within=1e-5)
    settings = read_json(folder / "run.json")["settings"]
    assert settings["processes"] == 2 and settings.get("sharded_by") == kind
    with pytest.raises(ValueError, match="processes was 2 and is absent"):
        refuse_other_settings(
            folder, settings, {k: v for k, v in settings.items() if k != "processes"}
        )


def test_a_run_of_one_backend_is_not_resumed_by_the_other(tmp_path):
    of_unsloth, of_trl = (
        run_settings("rlvr", RlvrConfig(backend=name), "data/arithmetic-base", [])
        for name in backends.BACKENDS
    )
    assert "vllm_server" not in of_trl, "a run goes on with another server"
    older = {name: value for name, value in of_unsloth.items() if name != "backend"}
    for recorded, was in ((of_unsloth, '"unsloth"'), (older, "absent")):
        open_run(tmp_path / was, recorded)
        with pytest.raises(ValueError, match=f'backend was {was} and is "trl"'):
            open_run(tmp_path / was, of_trl)


COMMANDS = """
import sys, without_unsloth
from sage_unsloth.__main__ import main
codes = [
    main(["train", "--smoke", "--from", "arithmetic-base", "--out", sys.argv[1] + "/unsloth"]),
    main(["train", "--smoke", "--from", "arithmetic-base", "--out", sys.argv[1] + "/trl",
          "--backend", "trl", "--algorithm", "sage-branch", "--set", "eval_steps=1", "eval_rows=2",
          "max_completion_length=16"]),
    main(["evaluate", "--models", "trl=" + sys.argv[1] + "/trl", "--benchmarks", "arithmetic",
          "--smoke", "--out", sys.argv[1] + "/evaluation"]),
]
assert not {"unsloth", "unsloth_zoo"} & set(sys.modules)
print("CODES", codes)
"""


@pytest.mark.long
def test_the_commands_where_unsloth_is_not_installed(tmp_path):
    done = started("-c", COMMANDS, tmp_path)
    assert "CODES [2, 0, 0]" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "needs the package unsloth, which is not installed (pip install" in done.stderr
    assert not (tmp_path / "unsloth").exists()
    made = {path.name for path in (tmp_path / "trl").iterdir()}
    assert {"run.json", "preflight.json", "metrics.jsonl", "adapter", "held-out", "best"} <= made


def test_a_process_has_one_backend(unsloth_module, monkeypatch):
    with pytest.raises(ValueError, match="never imported Unsloth"):
        backends.check_backend("trl")
    with pytest.raises(ValueError, match="one of unsloth, trl, got 'megatron'"):
        backends.check_backend("megatron")
    monkeypatch.setattr(backends, "_chosen", ["trl"])
    assert backends.backend() == "trl"
    with pytest.raises(ValueError, match="got backend='unsloth' after 'trl'"):
        backends.check_backend("unsloth")


def test_what_trls_trainer_cannot_train_is_refused(monkeypatch):
    check_trl_config(RlvrConfig(backend="trl"))
    for settings, message in (
        (dict(load_in_4bit=True), "Set load_in_4bit=False"),
        (dict(recompute_logits=True), "Set recompute_logits=False"),
        (dict(rollouts="server"), "a CUDA device for NCCL"),
        (dict(rollouts="vllm"), "rollouts='vllm' is not available"),
        (
            dict(credit="sequence", kl_estimator="k3-is", micro_batch_size=4),
            "Set micro_batch_size=None",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_trl_config(RlvrConfig(backend="trl", **settings))
    with pytest.raises(ValueError, match="Set backend=trl"):
        check_trl_config(RlvrConfig(rollouts="server"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_trl_config(RlvrConfig(backend="trl"))
    with pytest.raises(ValueError, match="Set eval_steps=0"):
        check_trl_config(RlvrConfig(backend="trl", eval_steps=5))


def test_the_reference_is_the_model_without_adapters():
    from conftest import tiny_model

    model = tiny_model(0.05)
    model.add_adapter("ref", model.peft_config["default"])
    keep_base_as_reference(model)
    assert list(model.peft_config) == ["default"]
    assert any(p.requires_grad for n, p in model.named_parameters() if ".default." in n)


def test_every_request_to_a_server_is_compared():
    from trl.generation.vllm_client import VLLMClient

    sent = []
    client = object.__new__(VLLMClient)
    client.model, client.base_url = "m", "http://127.0.0.1:8000"
    answer = {"choices": [{"prompt_token_ids": [5], "token_ids": [7], "logprobs": None}]}
    client._post = lambda url, json: sent.append(json) or answer
    expected = {"temperature": 0.9, "min_p": 0.01, "max_tokens": 4, "logit_bias": {1: -100.0}}
    check_requests(client, expected)
    asked = expected | {"generation_kwargs": {"logit_bias": expected["logit_bias"]}}
    del asked["logit_bias"]
    assert client.generate(prompts=[[5]], **asked)["completion_ids"] == [[7]]
    assert expected.items() <= sent[0].items()
    with pytest.raises(RolloutError, match=r"'temperature': 1\.0"):
        client.generate(prompts=[[5]], **asked | {"temperature": 1.0})
    with pytest.raises(RolloutError, match="'logit_bias': 'absent'"):
        client.generate(prompts=[[5]], **asked | {"generation_kwargs": None})
    assert len(sent) == 1


@pytest.mark.parametrize("file", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_reads_the_configuration_files(file):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    found = load_config_from_file(str(file))
    assert found.num_processes == 8 and found.mixed_precision == "no"
    known = vars(launch_command_parser().parse_args(["script.py"]))
    values = yaml.safe_load(file.read_text())
    for group in ("fsdp_config", "deepspeed_config"):
        assert values.get(group, {}).keys() <= known.keys()


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_reads_its_configuration(stage):
    """Where it is installed; it is no dependency of the package."""
    config = pytest.importorskip("deepspeed.runtime.config")
    from accelerate.utils import DeepSpeedPlugin

    file = CONFIGURATIONS / f"zero{stage}.yaml"
    values = yaml.safe_load(file.read_text())["deepspeed_config"]
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=1, **values)
    given = plugin.deepspeed_config | {"train_batch_size": 8, "gradient_clipping": 1.0}
    known = {name: value for name, value in given.items() if value != "auto"}
    assert config.DeepSpeedConfig(known).zero_optimization_stage == stage


def test_the_requirements_are_those_of_the_package_without_unsloth():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    absent = ("unsloth", "bitsandbytes")
    wanted = [text for text in project["dependencies"] if not text.startswith(absent)]
    lines = (ROOT / "requirements-trl.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["-c constraints.txt", *wanted]
