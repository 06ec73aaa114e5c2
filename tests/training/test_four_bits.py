"""SFT → RL → evaluation → export on 4-bit weights, on the shipped base model."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sage_unsloth.__main__ import main
from sage_unsloth.export.exporter import export
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.quantised import dequantise
from sage_unsloth.models.trained import read_run
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.training.outcomes import evaluation_command
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import SftJob, sft
from sage_unsloth.training.stage import read_metrics
from sage_unsloth.training.starting import starting_point

pytestmark = pytest.mark.long

BASE = data_folder() / BASE_MODEL
TRAIN = arithmetic.problems("train")
SFT = replace(
    smoke_config().sft, load_in_4bit=True, max_steps=4, warmup_steps=0, learning_rate=5e-3
)
RLVR = replace(
    smoke_config().rlvr, load_in_4bit=True, max_steps=3, save_steps=2, learning_rate=5e-3
)


@pytest.fixture(scope="module")
def merged(tmp_path_factory, unsloth_module):
    return sft(SFT, BASE, arithmetic.problems("sft"), tmp_path_factory.mktemp("four") / "sft")


@pytest.fixture(scope="module")
def run(merged):
    folder = merged.parent.parent / "rl"
    rlvr(RLVR, merged, TRAIN, folder, BranchGuide())
    return folder


def log_probs(path, **settings):
    with torch.no_grad():
        model = load_policy(path, **settings)[0]
        return model(input_ids=torch.arange(20, 60)[None]).logits.double().log_softmax(-1)


def kl(one, other):
    """Mean KL(one ‖ other), nats a token."""
    return (one.exp() * (one - other)).sum(-1).mean().item()


def test_sft_is_merged_so_that_it_may_be_quantised_again(merged):
    """Into the model before it was quantised: rounding then leaves what was trained. Of a merge
    into the values of the 4-bit weights it leaves next to nothing.
    """
    adapter = merged.parent / "adapter"
    below, policy = (log_probs(BASE, adapter=a, load_in_4bit=True) for a in (None, adapter))
    assert kl(log_probs(BASE, adapter=adapter), log_probs(merged)) < 1e-8
    again = log_probs(merged, load_in_4bit=True)
    trained = policy - below
    kept = ((again - below) * trained).sum() / trained.square().sum()
    assert kept > 0.5
    assert {w.dtype for w in load_file(adapter / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    weights = load_file(adapter / "adapter_model.safetensors")
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights.values())


def test_sft_compares_the_model_before_with_the_policy_as_trained(merged, tmp_path, monkeypatch):
    from sage_unsloth.training import sft_recipe

    loaded = []

    def load(path, **settings):
        loaded.append((path, settings["adapter"], settings["load_in_4bit"]))
        return load_policy(path, **settings)

    monkeypatch.setattr(sft_recipe, "load_policy", load)
    rows = arithmetic.problems("sft")[:1]
    short = replace(SFT, max_length=24)
    job = SftJob(short, BASE, rows, tmp_path)
    assert len(sft_recipe.before_and_after(job, merged, rows, MATH, RlvrConfig())) == 2
    assert loaded == [(BASE, None, True), (BASE, merged.parent / "adapter", True)]


def test_the_reference_of_rl_is_the_merged_model_quantised(merged, run):
    """π_ref is the model in 4 bits with the adapter off, so the first step's KL is 0; it is not the
    4-bit base that SFT trained on.
    """
    first = read_metrics(run)[0]
    assert abs(first["kl/ref_k3"]) < 1e-7
    assert first["grad_norm"] > 0
    assert max(w.abs().max() for w in load_file(run / "adapter/adapter_model.safetensors").values())
    assert json.loads((run / "run.json").read_text())["settings"]["load_in_4bit"] is True
    reference, below = (load_policy(path, load_in_4bit=True)[0] for path in (merged, BASE))
    others = dict(below.named_parameters())
    moved = [
        not torch.equal(dequantise(parameter), dequantise(others[name]))
        for name, parameter in reference.named_parameters()
        if parameter.dtype == torch.uint8
    ]
    assert all(moved)


def test_a_killed_run_ends_in_the_same_bits(merged, run, tmp_path, monkeypatch):
    """Stopped within step 3, after the checkpoint of step 2."""
    from sage_unsloth.grading.reward import SolutionReward

    calls, reward = [], SolutionReward.__call__

    def dies(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return reward(self, *args, **kwargs)

    monkeypatch.setattr(SolutionReward, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        rlvr(RLVR, merged, TRAIN, tmp_path, BranchGuide())
    with pytest.raises(ValueError, match="load_in_4bit was true and is false"):
        rlvr(replace(RLVR, load_in_4bit=False), merged, TRAIN, tmp_path, BranchGuide())
    adapter = rlvr(RLVR, merged, TRAIN, tmp_path, BranchGuide())
    found, expected = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter, run / "adapter")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_is_evaluated_as_it_was_trained(merged, run, tmp_path, capsys):
    out = tmp_path / "evaluation"

    def evaluated(*more):
        models = [f"sft={merged.parent}", f"base={BASE}", f"rl={run}"]
        sizes = ["--problems", "2", "--n", "1", "--max-tokens", "8"]
        command = ["evaluate", "--models", *models, "--benchmarks", "arithmetic", *sizes]
        return main([*command, "--out", str(out), *more])

    assert evaluated() == 0
    assert "sft, rl in 4 bits, as trained, base not: --load-in-4bit" in capsys.readouterr().out
    settings = {
        name: json.loads((out / f"samples/arithmetic/{name}.settings.json").read_text())["settings"]
        for name in ("sft", "base", "rl")
    }
    bits = {name: of.get("weight_bits") for name, of in settings.items()}
    assert bits == {"sft": 4, "base": None, "rl": 4}
    assert settings["sft"]["adapter"] and settings["sft"]["weights"] == settings["base"]["weights"]
    for more, message in (
        ("--no-load-in-4bit", "weight_bits was 4 and is absent"),
        ("--load-in-4bit", "weight_bits was absent and is 4"),
    ):
        assert evaluated(more) == 2
        assert message in capsys.readouterr().err


def test_the_next_command_quantises_what_it_started_from_too(merged):
    point = starting_point(merged.parent, "sft")
    with_bits = evaluation_command(point, "grpo", merged.parent, RLVR)
    without = evaluation_command(point, "grpo", merged.parent, replace(RLVR, load_in_4bit=False))
    assert with_bits == f"{without} --load-in-4bit"


def test_exports_say_how_far_they_are_from_the_policy(run, merged, tmp_path):
    found = {}
    for kind, one in (("adapter", run), ("merged", run), ("sft", merged.parent)):
        out = export(read_run(one), "merged" if kind == "sft" else kind, tmp_path / kind)
        checks = json.loads((out / "export.json").read_text())["checks"]
        (found[kind],) = (float(value) for name, value in checks.items() if name.startswith("KL"))
        card = (out / "README.md").read_text()
        assert "to the policy in 4 bits, nats a token" in card
        assert "| load_in_4bit | True |" in card
        assert ("quantization_config=four_bit" in card) == (kind == "adapter")
    # Merged exactly, in bfloat16; the base before it was quantised is another model.
    assert max(found["sft"], found["merged"]) < 1e-4 < found["adapter"], found
    with pytest.raises(ValueError, match=r"nearly all of its training.* Start from its run"):
        load_policy(tmp_path / "sft", load_in_4bit=True)
