"""Exports of a real run on the shipped base model; GGUF and the hub to the point that a machine
without either reaches.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_unsloth.__main__ import main
from sage_unsloth.export.adapter_checks import (
    Answers,
    check_adapter,
    check_effect,
    check_parity,
    greedy_answers,
)
from sage_unsloth.export.exporter import export, is_export, origin
from sage_unsloth.export.hub import push
from sage_unsloth.export.model_card import _pass_at_k, final_metrics, model_card
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.models import loading as models
from sage_unsloth.models import merging
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.models.merging import save_merged
from sage_unsloth.models.trained import read_run
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.runs.settings import EVALUATION, SAVING, config_settings
from sage_unsloth.sampling.record_sets import prompt_ids
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_config import SftConfig

BASE = data_folder() / BASE_MODEL
TOKEN = "hf_secretsecretsecret"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, unsloth_module):
    """A finished RL run whose adapter then gets a visible size: two steps alone hardly move it."""
    folder = tmp_path_factory.mktemp("runs") / "rl"
    config = replace(smoke_config().rlvr, learning_rate=5e-3)
    adapter = rlvr(config, BASE, arithmetic.problems("train"), folder, BranchGuide())
    weights = load_file(adapter / "adapter_model.safetensors")
    torch.manual_seed(0)
    for name in weights:
        if "lora_B" in name:
            weights[name] = 0.05 * torch.randn_like(weights[name])
    save_file(weights, adapter / "adapter_model.safetensors")
    return folder


@pytest.fixture
def run(run_folder):
    return read_run(run_folder, BASE)


@pytest.fixture
def zero_run(run, tmp_path):
    """The same run with an adapter that was never trained."""
    folder = tmp_path / "zero"
    shutil.copytree(run.folder, folder)
    path = folder / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({n: w.zero_() if "lora_B" in n else w for n, w in weights.items()}, path)
    return read_run(folder, BASE)


def test_adapter_export_is_loaded_again(run, tmp_path):
    out = export(run, "adapter", tmp_path / "new" / "adapter")
    assert {p.name for p in out.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "README.md",
        "export.json",
    }
    model, tokenizer = load_policy(BASE, adapter=out)
    assert check_effect(model, tokenizer) > 0.01
    checks = json.loads((out / "export.json").read_text())["checks"]
    largest = max(
        float(w.abs().max())
        for n, w in load_file(run.adapter / "adapter_model.safetensors").items()
        if "lora_B" in n
    )
    assert checks["largest |B|"] == pytest.approx(largest, abs=1e-6)
    assert not (tmp_path / "new" / "adapter.partial").exists()


def test_adapter_names_the_base_that_it_is_told(run, tmp_path):
    out = export(run, "adapter", tmp_path / "adapter", base_id="someone/sft-model")
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/sft-model"
    assert (
        'AutoModelForCausalLM.from_pretrained("someone/sft-model"'
        in (out / "README.md").read_text()
    )


@pytest.mark.long
def test_the_cards_example_answers_as_the_package_does(run, tmp_path):
    """Run as a person would, who has transformers and peft and not this package: one process for
    an adapter's and a merged model's, one after the other.
    """
    codes, expected = [], []
    for kind in ("adapter", "merged"):
        out = export(run, kind, tmp_path / kind)
        (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
        assert "sage_unsloth" not in code
        codes.append(code)
        model, tokenizer = load_policy(
            *((BASE,) if kind == "adapter" else (out,)),
            **({"adapter": run.adapter} if kind == "adapter" else {}),
        )
        ids = torch.tensor([prompt_ids(tokenizer, "12*6=?")])
        text = tokenizer.decode(
            model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :]
        )
        assert text.endswith("</SOLUTION><|endoftext|>"), "in the format, which the prompt asks for"
        expected.append(text.strip())
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", "\nprint('---')\n".join(codes)],
        cwd=tmp_path,
        env=bare,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [text.strip() for text in done.stdout.split("---\n")] == expected


def test_no_path_of_this_machine_is_in_card_and_record(run, tmp_path):
    out = export(run, "adapter", tmp_path / "adapter", base_id="someone/sft-model")
    for path in out.iterdir():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for secret in (str(BASE), str(run.folder), str(tmp_path)):
            assert secret not in text, path.name


def test_merged_export_has_16_bits_and_answers_as_the_adapter(run, tmp_path):
    out = export(run, "merged", tmp_path / "merged")
    assert {w.dtype for w in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    model, tokenizer = load_policy(BASE, adapter=run.adapter)
    answers = greedy_answers(model, tokenizer)
    merged, _ = load_policy(out)
    found = check_parity(merged, answers)
    assert found["agreement"] > 0.95 and found["distance"] < 0.1
    checks = json.loads((out / "export.json").read_text())["checks"]
    assert checks["greedy tokens that agree with base and adapter"] == f"{found['agreement']:.1%}"


def test_parity_of_an_exact_merge_is_exact(run, tmp_path):
    model, tokenizer = load_policy(BASE, adapter=run.adapter)
    answers = greedy_answers(model, tokenizer)
    save_merged(model, tokenizer, tmp_path / "exact")
    found = check_parity(load_policy(tmp_path / "exact")[0], answers)
    assert found["agreement"] == 1.0 and found["distance"] < 1e-4


def test_parity_refuses_a_model_without_the_adapter(run):
    model, tokenizer = load_policy(BASE, adapter=run.adapter)
    answers = greedy_answers(model, tokenizer)
    base, _ = load_policy(BASE)
    with pytest.raises(ValueError, match="must answer as base and adapter do"):
        check_parity(base, answers)


def test_parity_is_of_the_answer_alone():
    """Logits inside the prompt choose no token of the answer; those after the last choose none."""
    ids, prompt_length = torch.zeros(1, 6, dtype=torch.long), 3
    torch.manual_seed(0)
    base, expected = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    found = expected.clone()
    found[:, : prompt_length - 1] += 100 * torch.randn(1, prompt_length - 1, 8)
    found[:, -1] += 100 * torch.randn(1, 8)

    class Merged(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return SimpleNamespace(logits=found)

    answers = Answers([ids], [prompt_length - 1], [expected], [base])
    assert check_parity(Merged(), answers) == {"agreement": 1.0, "distance": 0.0, "kl": 0.0}


def test_parity_warns_when_rounding_eats_the_training(run, tmp_path, caplog):
    folder = tmp_path / "faint"
    shutil.copytree(run.adapter, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {n: w * 1e-3 if "lora_B" in n else w for n, w in weights.items()},
        folder / "adapter_model.safetensors",
    )
    model, tokenizer = load_policy(BASE, adapter=folder)
    answers = greedy_answers(model, tokenizer)
    save_merged(model, tokenizer, tmp_path / "merged", dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        found = check_parity(load_policy(tmp_path / "merged")[0], answers)
    assert found["distance"] > 0.5 and "share the adapter instead" in caplog.text


@pytest.mark.parametrize("to", ["adapter", "merged"])
def test_an_adapter_of_zeros_is_refused_and_leaves_nothing(zero_run, tmp_path, to):
    with pytest.raises(ValueError, match="must not be zero"):
        export(zero_run, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_effect_of_a_fresh_adapter_is_none(unsloth_module):
    model, tokenizer = load_policy(BASE, lora=LoraSettings())
    with pytest.raises(
        ValueError, match=r"more than noise \(.*\), but it changes them by 0.0e\+00"
    ):
        check_effect(model, tokenizer)


def test_broken_adapters_are_refused(run, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(run.adapter, folder)
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    name = next(iter(weights))
    weights[name][0, 0] = float("nan")
    save_file(weights, path)
    with pytest.raises(ValueError, match="must be finite"):
        check_adapter(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks adapter_model\.safetensors"):
        check_adapter(folder)


def test_nothing_is_overwritten(run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="does not overwrite"):
        export(run, "adapter", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_export_is_started_again(run, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "rubbish").write_text("x")
    out = export(run, "adapter", tmp_path / "out")
    assert not (out / "rubbish").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message of a machine without a GPU")
def test_gguf_without_a_gpu_says_what_to_do(run, tmp_path):
    with pytest.raises(RuntimeError, match=r"needs a GPU.*convert_hf_to_gguf\.py"):
        export(run, "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fully_trained_run_is_exported_merged_only(run, tmp_path, token, capsys):
    folder = tmp_path / "full"
    folder.mkdir()
    shutil.copy(run.folder / "run.json", folder)
    shutil.copytree(BASE, folder / "model")
    full = read_run(folder, BASE)
    with pytest.raises(ValueError, match="trained every weight and has no adapter"):
        export(full, "adapter", tmp_path / "a")
    command = ["export", str(folder), "--to", "hub", "--repo-id", "me/mine"]
    assert main([*command, "--model", str(BASE)]) == 2
    assert "has no adapter. Export it merged" in capsys.readouterr().err
    out = export(full, "merged", tmp_path / "m")
    assert (out / "model.safetensors").read_bytes() == (BASE / "model.safetensors").read_bytes()
    assert "library_name: transformers" in (out / "README.md").read_text()


def test_runs_that_cannot_be_exported(run, tmp_path):
    with pytest.raises(ValueError, match=r"with run\.json, got .*. Give one of rl in it"):
        read_run(run.folder.parent, BASE)
    with pytest.raises(ValueError, match="Give it by --model"):
        folder = tmp_path / "unnamed"
        shutil.copytree(run.folder, folder)
        record = json.loads((folder / "run.json").read_text())
        record.pop("model_path", None)
        (folder / "run.json").write_text(json.dumps(record))
        read_run(folder)
    shutil.rmtree(folder / "adapter")
    with pytest.raises(ValueError, match="must be complete"):
        read_run(folder, BASE)
    record["settings"] = {"command": "quickstart"}
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is of another kind"):
        read_run(folder, BASE)


def test_the_starting_model_is_read_from_the_run(run, tmp_path):
    folder = tmp_path / "named"
    shutil.copytree(run.folder, folder)
    record = json.loads((folder / "run.json").read_text()) | {"model_path": str(BASE)}
    (folder / "run.json").write_text(json.dumps(record))
    assert read_run(folder).model_path == str(BASE)
    assert read_run(folder, "other").model_path == "other"


def test_origin_follows_a_chain_of_runs(tmp_path):
    assert origin(BASE) == "arithmetic-base"
    assert origin("Qwen/Qwen2.5-Math-7B") == "Qwen/Qwen2.5-Math-7B"
    assert origin("/somewhere/Qwen2.5-Math-7B") == "Qwen/Qwen2.5-Math-7B"
    assert origin("somebody/their-model") == "somebody/their-model"
    assert origin("/somewhere/mine") == "mine"
    sft = tmp_path / "sft"
    (sft / "model").mkdir(parents=True)
    record = {"settings": {"stage": "sft", "model": "x"}, "model_path": "Qwen/Qwen2.5-Math-7B"}
    (sft / "run.json").write_text(json.dumps(record))
    assert origin(sft / "model") == "Qwen/Qwen2.5-Math-7B"


RECORD = {
    "settings": {
        "stage": "rlvr",
        "model": "Qwen2.5-Math-7B",
        "guide": "BranchGuide(ratio=0.3)",
        "max_steps": 1000,
        "beta": 0.05,
        "lora": {"rank": 8, "alpha": 16},
        "seed": 3407,
        "rows": "abc|def",
    },
    "environment": {
        "python": "3.12.1",
        "packages": {"unsloth": "2026.10.7", "vllm": None},
        "commit": "0123abc",
    },
}
METRICS = [{"step": i, "reward": i / 10, "kl/ref_k3": 0.5} for i in range(1, 31)]
MEANS = {
    "SFT": {"1": 0.2, "16": 0.5, "256": 0.7},
    "RL": {"1": 0.3, "16": 0.6, "256": 0.8},
}
REPORT = {
    "pass_at_k": {
        "all (60)": {
            model: {k: {"mean": m, "low": m - 0.1, "high": m + 0.1} for k, m in means.items()}
            for model, means in MEANS.items()
        }
    }
}


def card(**changes):
    arguments = dict(
        kind="adapter",
        name="me/mine",
        record=RECORD,
        metrics=METRICS,
        base="Qwen/Qwen2.5-Math-7B",
        license="apache-2.0",
        loads_on="me/sft",
        report=REPORT,
        checks={"largest |B|": 0.1},
    )
    return model_card(**(arguments | changes))


def test_card_says_what_it_is():
    text = card()
    header = text.split("---\n")[1].splitlines()
    assert header == [
        "base_model: Qwen/Qwen2.5-Math-7B",
        "library_name: peft",
        "license: apache-2.0",
        "pipeline_tag: text-generation",
        "tags:",
        "- grpo",
        "- unsloth",
        "- sage",
    ]
    for line in (
        "# me/mine",
        "| guide | BranchGuide(ratio=0.3) |",
        "| beta | 0.05 |",
        "| lora.rank | 8 |",
        "| rows | abc\\|def |",
        "Means over the last tenth of 30 steps, on training problems.",
        "| reward | 2.9 |",
        "| all (60) | pass@1 | pass@16 | pass@256 |",
        "| RL | 0.300 [0.200, 0.400] | 0.600 [0.500, 0.700] | 0.800 [0.700, 0.900] |",
        "| largest \\|B\\| | 0.1 |",
        "| unsloth | 2026.10.7 |",
        "| sage_unsloth, commit | 0123abc |",
        'base = AutoModelForCausalLM.from_pretrained("me/sft", dtype="auto")',
        "That of `Qwen/Qwen2.5-Math-7B`: apache-2.0.",
    ):
        assert line in text.splitlines(), line
    assert "vllm" not in text


@pytest.mark.parametrize(("stage", "config"), [("rlvr", RlvrConfig()), ("sft", SftConfig())])
def test_card_has_every_setting_that_changes_weights(stage, config):
    settings = json.loads(json.dumps({"stage": stage} | asdict(config)))
    table = card(record=RECORD | {"settings": settings}).split("## Trained with\n\n")[1]
    shown = re.findall(r"^\| ([\w.]+) \|", table.split("\n\n")[0], re.MULTILINE)
    empty = {
        name for name, item in config_settings(config).items() if item.default in (None, "", ())
    }
    groups = {name: item.group for name, item in config_settings(config).items()}
    others = {name for name, group in groups.items() if group in (EVALUATION, SAVING)}
    assert set(shown) - {"setting", "stage", "template"} == set(groups) - others - empty
    assert not {"save_steps", "report_to"} & set(shown)


def test_card_says_what_it_was_rewarded_for():
    text = card()
    assert f"| verifier | {MATH.label} |" in text and "| answer | weight 1 |" in text
    own = {"name": "brief", "weight": 0.25, "function": "my_rewards:brief", "source": "0f"}
    settings = {"verifier": "python 3", "rewards": [{"name": "answer", "weight": 1.0}, own]}
    text = card(record=RECORD | {"settings": RECORD["settings"] | settings})
    assert "| verifier | python 3 |" in text and "| answer | weight 1 |" in text
    assert "| brief | weight 0.25, my_rewards:brief |" in text
    sft = RECORD | {"settings": RECORD["settings"] | {"stage": "sft"}}
    assert "## Rewarded for" not in card(record=sft)


def test_card_says_what_it_was_trained_on():
    hub = {"hub_id": "openai/gsm8k", "config": "main", "split": "train", "revision": "e53f0"}
    file = {"path": "/home/me/kept.jsonl", "file": "kept.jsonl", "sha256": "ab" * 32, "rows": 64}
    data = hub | {"rows": 7473, "columns": {"problem": "question", "answer": "answer"}}
    data |= {"filters": {"rows": 7473, "first 2,000": 2000, "answer can be graded": 1990}}
    text = card(record=RECORD | {"data": data | {"held_out": file}})
    assert "datasets:\n- openai/gsm8k\n" in text.split("---\n")[1]
    table = text.split("## Trained on\n\n")[1].split("\n\n")[0]
    assert table.splitlines()[2:] == [
        "| data set of the hub | openai/gsm8k |",
        "| configuration | main |",
        "| split | train |",
        "| revision | e53f0 |",
        "| rows | 7,473 |",
        "| columns | problem=question, answer=answer |",
        "| rows left by: first 2,000 | 2,000 |",
        "| rows left by: answer can be graded | 1,990 |",
        "| held out, file | kept.jsonl |",
        f"| held out, sha256 | {'ab' * 32} |",
        "| held out, rows | 64 |",
    ]
    assert "Trained on" not in card(), "an earlier version kept no record of it"


def evaluated(*models):
    """What `report.json` holds of models on a data set of the hub."""
    curve = {"1": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    row = {"benchmark": "gsm8k", "problems": 9, "samples": 1, "seeds": 1}
    return {
        "table": [row | {"model": model} for model in models],
        "pass_at_k": {"gsm8k": dict.fromkeys(models, curve)},
        "datasets": {"gsm8k": [{"hub_id": "openai/gsm8k", "rows": 9}]},
        "sampling": {"temperature": 1.0},
        "environment": {"date": "2026-11-22T05:00:00+00:00"},
    }


def test_card_has_the_results_of_its_own_model_where_the_hub_looks():
    from huggingface_hub import ModelCard

    text = card(report=evaluated("base", "mine"), report_model="mine")
    found = ModelCard(text).data
    (result,) = found.eval_results or []
    assert (found.model_name, result.dataset_type) == ("me/mine", "openai/gsm8k")
    assert (result.metric_type, result.metric_value) == ("pass@1", 50.0)
    assert found.tags == ["grpo", "unsloth", "sage"]
    assert "model-index" not in card(report=evaluated("base", "mine"))


def test_an_export_has_result_files_of_the_hub(run, tmp_path):
    out = export(run, "adapter", tmp_path / "one", report=evaluated("mine"))
    assert "value: 50.0" in (out / ".eval_results" / "gsm8k.yaml").read_text()
    assert "model-index" in (out / "README.md").read_text()
    with pytest.raises(ValueError, match=r"one of base, mine, got 'x'. Set --report-model"):
        export(run, "adapter", tmp_path / "two", report=evaluated("base", "mine"), report_model="x")
    assert not (tmp_path / "two").exists()


def test_a_models_name_belongs_to_a_report(tmp_path, capsys):
    command = ["export", str(tmp_path), "--to", "adapter", "--report-model", "mine"]
    assert main(command) == 2
    assert "needs --report report.json" in capsys.readouterr().err


def test_card_of_other_licences():
    other = card(license="qwen-research", base="Qwen/Qwen2.5-3B-Instruct")
    assert (
        "license: other\nlicense_name: qwen-research\nlicense_link: "
        "https://huggingface.co/Qwen/Qwen2.5-3B-Instruct/blob/main/LICENSE" in other
    )
    assert "may exclude commercial use" in other
    unknown = card(license=None, base="mine")
    assert "license:" not in unknown and "base_model" not in unknown
    assert "look there before you share" in unknown


def test_card_of_each_kind():
    assert "peft" not in card(kind="merged").split("## Versions")[0]
    assert 'folder = "me/mine"' in card(kind="merged")
    assert 'folder = "out"' in card(kind="merged", loads_from="out")
    quantised = RECORD | {"settings": RECORD["settings"] | {"load_in_4bit": True}}
    assert "BitsAndBytesConfig" in card(record=quantised) and "BitsAndBytesConfig" not in card()
    assert "llama-cli" in card(kind="gguf") and "library_name" not in card(kind="gguf")
    assert "which is not on the hub" in card(loads_on=None)
    assert "supervised fine-tuning" in card(record=RECORD | {"settings": {"stage": "sft"}})
    with pytest.raises(ValueError, match="kind must be one of"):
        card(kind="onnx")


def test_card_without_what_is_not_there():
    text = card(metrics=[], report=None, checks=None)
    assert "## At the end" not in text and "pass@k" not in text and "## Checked" not in text


def test_final_metrics_by_hand():
    rows = [{"step": i, "reward": float(i), "text": "x"} for i in range(1, 21)]
    rows[-1]["kl"] = 3
    assert final_metrics(rows) == {"reward": 19.5, "kl": 3.0}
    assert final_metrics([]) == {}


@pytest.fixture
def exported(run, tmp_path):
    return export(run, "adapter", tmp_path / "hub", name="me/mine", base_id="me/sft")


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def test_push_without_a_hub_says_so_and_hides_the_token(exported, token, capsys, caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(ConnectionError) as refusal:
        push(exported, "me/mine")
    message = str(refusal.value)
    assert "the push to " in message and "The export stays in" in message
    assert refusal.value.__cause__ is None and refusal.value.__suppress_context__
    printed = capsys.readouterr()
    assert TOKEN not in message + printed.out + printed.err + caplog.text
    assert all(TOKEN.encode() not in path.read_bytes() for path in exported.iterdir())


def test_push_hides_a_token_inside_an_error(exported, token, monkeypatch):
    from huggingface_hub import HfApi

    def refuse(self, *arguments, **settings):
        raise OSError(f"401 for Bearer {TOKEN}")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(ConnectionError, match=r"401 for Bearer \*\*\*") as refusal:
        push(exported, "me/mine")
    assert TOKEN not in str(refusal.value)


def test_push_uses_parameters_that_the_hub_client_has():
    """Every keyword that `push` gives is one of the installed client's."""
    import inspect

    from huggingface_hub import HfApi

    assert {"repo_id", "private", "exist_ok"} <= set(
        inspect.signature(HfApi.create_repo).parameters
    )
    assert {"repo_id", "folder_path", "commit_message"} <= set(
        inspect.signature(HfApi.upload_folder).parameters
    )
    assert "repo_id" in inspect.signature(HfApi.list_repo_files).parameters


def test_push_refuses(exported, run, token, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="only an export is pushed"):
        push(run.adapter, "me/mine")
    local = export(run, "adapter", tmp_path / "local")
    with pytest.raises(
        ValueError,
        match="must name a base on the hub, but this one names the folder 'arithmetic-base'",
    ):
        push(local, "me/mine")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"pushing needs a token. Run `hf auth login`"):
        push(exported, "me/mine")


def test_command(run, tmp_path, capsys):
    command = [
        "export",
        str(run.folder),
        "--to",
        "adapter",
        "--model",
        str(BASE),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 0
    assert (tmp_path / "out" / "README.md").exists()
    assert main(command) == 2
    assert "does not overwrite" in capsys.readouterr().err


def test_command_pushes_the_export_that_is_there(run, tmp_path, token, capsys):
    out = tmp_path / "out"
    command = [
        "export",
        str(run.folder),
        "--to",
        "hub",
        "--model",
        str(BASE),
        "--out",
        str(out),
        "--base-id",
        "me/sft",
    ]
    assert main(command) == 2
    assert "needs --repo-id owner/name" in capsys.readouterr().err
    assert main([*command, "--repo-id", "me/mine"]) == 2
    assert "the push to " in capsys.readouterr().err
    assert is_export(out, "adapter", "me/mine")
    written = (out / "README.md").stat().st_mtime_ns
    assert main([*command, "--repo-id", "me/mine"]) == 2
    assert "the push to " in capsys.readouterr().err
    assert (out / "README.md").stat().st_mtime_ns == written
    # The file is pushed: it names no path of this machine.
    assert re.fullmatch("[0-9a-f]{16}", json.loads((out / "export.json").read_text())["requested"])
    same = ["--repo-id", "me/mine"]
    for changed in (
        ["--repo-id", "me/other"],
        [*same, "--base-id", "me/base"],
        [*same, "--quantization", "q8_0"],
    ):
        assert main([*command, *changed]) == 2
        assert "does not overwrite" in capsys.readouterr().err


def test_a_base_that_is_a_folder_is_refused_before_the_export(run, tmp_path, token, capsys):
    out = tmp_path / "out"
    command = ["export", str(run.folder), "--to", "hub", "--repo-id", "me/mine"]
    assert main([*command, "--model", str(BASE), "--out", str(out)]) == 2
    assert "must name a base on the hub" in capsys.readouterr().err
    assert not out.exists()


def test_the_cards_table_has_the_k_that_all_models_have():
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6}
    curves = {"a": dict.fromkeys(("1", "2", "4", "8"), estimate)}
    curves["b"] = dict.fromkeys(("1", "2", "4"), estimate)
    table = _pass_at_k({"own": curves})
    assert "pass@1" in table and "pass@4" in table and "pass@8" not in table


@pytest.fixture
def unsloth_saves(monkeypatch):
    """The GPU branch of `save_merged`: Unsloth's own merge, which a CPU can run once it is not
    asked for the card's name.
    """
    monkeypatch.setattr(merging, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "none")


def test_unsloths_merge_is_the_one_of_peft(run, tmp_path, unsloth_saves):
    model, tokenizer = load_on_cpu(run)
    answers = greedy_answers(model, tokenizer)
    save_merged(model, tokenizer, tmp_path / "merged")
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    model.merge_and_unload()
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    expected = model.get_base_model().state_dict()[q_proj]
    assert torch.allclose(
        weights[q_proj].float(), expected, atol=2**-8 * float(expected.abs().max())
    )
    merged = load_on_cpu(run, tmp_path / "merged")[0]
    assert check_parity(merged, answers)["agreement"] > 0.95


def test_unsloths_merge_stays_where_it_is_told_on_kaggle(run, tmp_path, unsloth_saves, monkeypatch):
    """Unsloth moves a relative folder that does not fit Kaggle's working directory to /tmp; ours is
    absolute.
    """
    from unsloth_zoo import disk_utils

    working, elsewhere = tmp_path / "working", tmp_path / "tmp"
    working.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("UNSLOTH_IS_KAGGLE", "1")
    monkeypatch.setattr(disk_utils, "KAGGLE_WORKING", str(working))
    monkeypatch.setattr(disk_utils, "KAGGLE_TMP", str(elsewhere))
    monkeypatch.setattr(
        disk_utils, "free_bytes", lambda path: 0 if "working" in str(path) else 2**40
    )
    monkeypatch.chdir(working)
    moved, _ = disk_utils.kaggle_tmp_redirect("run/model.partial", need_bytes=10)
    assert moved.startswith(str(elsewhere))  # the danger is real
    model, tokenizer = load_on_cpu(run)
    save_merged(model, tokenizer, Path("run/model"))
    assert (working / "run" / "model" / "config.json").exists()
    assert not list(elsewhere.rglob("*.safetensors"))


def load_on_cpu(run, merged=None):
    """As `load_policy` does it without a GPU, while `has_gpu` says that there is one."""
    path, adapter = (run.model_path, run.adapter) if merged is None else (merged, None)
    loaded = models._load_plain(path, None, adapter, 0, None, dtype="float32", device="cpu")
    return models.prepare_for_cpu(loaded[0]), loaded[1]


def test_a_merge_that_went_elsewhere_is_an_error(run, tmp_path, unsloth_saves, monkeypatch):
    import unsloth.save

    monkeypatch.setattr(
        unsloth.save,
        "_preflight_merge_disk",
        lambda model, folder, *rest, **more: str(tmp_path / "away"),
    )
    model, tokenizer = load_on_cpu(run)
    with pytest.raises(OSError, match="say where it saved"):
        save_merged(model, tokenizer, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_full_disk_is_refused_before_writing(run, tmp_path, monkeypatch):
    model, tokenizer = load_policy(BASE, adapter=run.adapter)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"the merged model needs .* has 0\.0 GiB free"):
        save_merged(model, tokenizer, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_merge_left_is_not_mixed_in(run, tmp_path):
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "model.safetensors.index.json").write_text("{}")
    model, tokenizer = load_policy(BASE, adapter=run.adapter)
    save_merged(model, tokenizer, tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors.index.json").exists()


@pytest.mark.skipif(models.has_gpu(), reason="a GPU can make one")
def test_the_command_says_what_a_gguf_needs(run, tmp_path, capsys):
    assert main(["export", str(run.folder), "--to", "gguf", "--out", str(tmp_path / "gguf")]) == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "no json", None])
def test_a_report_for_the_card_is_one_of_an_evaluation(tmp_path, capsys, content):
    report = tmp_path / "report.json"
    if content is not None:
        report.write_text(content)
    command = ["export", str(tmp_path), "--to", "adapter", "--report", str(report)]
    assert main(command) == 2
    assert "--report must be the report.json of an evaluation" in capsys.readouterr().err


def test_a_push_without_a_token_is_refused_before_anything_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["export", str(tmp_path), "--to", "hub", "--repo-id", "me/it"]) == 2
    assert "pushing needs a token" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
