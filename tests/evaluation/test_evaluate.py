"""The evaluate and compare commands as a user runs them, and the report by hand."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.complete_sets import model_identities
from sage_unsloth.evaluation.evaluator import (
    choose_engine,
    evaluate_models,
    parse_benchmark,
)
from sage_unsloth.evaluation.figures import plot_differences
from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.evaluation.metrics import Difference, pass_at_k
from sage_unsloth.evaluation.named_models import parse_model
from sage_unsloth.evaluation.record_tables import record_set
from sage_unsloth.evaluation.report import deviation_over_seeds, report_sets
from sage_unsloth.evaluation.report_text import report_text
from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.weights import check_adapter_fits, model_identity
from sage_unsloth.sampling.engines import BATCH_SIZES, SamplingConfig
from sage_unsloth.sampling.record_files import read_samples, read_settings, settings_path

BASE = data_folder() / BASE_MODEL
LEFT_BEHIND = (
    "report.json",
    "table.csv",
    "pass_at_k.png",
    "pass_at_k.csv",
    "differences.png",
    "differences.csv",
    "coverage.csv",
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A LoRA adapter on the tiny base that changes what it says."""
    import torch

    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(BASE),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


def arguments(out, adapter, *more):
    return [
        "evaluate",
        "--models",
        f"base={BASE}",
        f"tuned={BASE}+{adapter}",
        "--benchmarks",
        "arithmetic",
        "--problems",
        "3",
        "--n",
        "4",
        "--temperature",
        "1",
        "--min-p",
        "0",
        "--max-tokens",
        "48",
        "--out",
        str(out),
        *more,
    ]


@pytest.fixture(scope="module")
def evaluated(unsloth_module, adapter, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluation") / "run"
    training = tmp_path_factory.mktemp("train") / "train.jsonl"
    training.write_text(json.dumps({"question": "1+1=?", "answer": "2"}) + "\n")
    assert main(arguments(out, adapter, "--train", str(training))) == 0
    return out


def test_evaluate_leaves_everything_it_promises(evaluated, adapter):
    for name in LEFT_BEHIND:
        assert (evaluated / name).exists(), name
    for model in ("base", "tuned"):
        assert len(read_samples(evaluated / "samples" / "arithmetic" / f"{model}.jsonl")) == 12
    table = list(csv.DictReader((evaluated / "table.csv").open()))
    assert [row["model"] for row in table] == ["base", "tuned"]
    texts = [
        {r["completion"] for r in read_samples(evaluated / "samples" / "arithmetic" / f"{m}.jsonl")}
        for m in ("base", "tuned")
    ]
    assert texts[0] != texts[1], "the adapter is on"
    recorded = read_settings(evaluated / "samples" / "arithmetic" / "tuned.jsonl")
    assert recorded["provenance"] == [{"split": "test", "rows": 100}]
    assert recorded["settings"] == {
        "model": "tuned",
        "benchmark": "arithmetic",
        "engine": "transformers",
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_completion_length": 48,
            "seed": 3407,
        },
        **model_identity(BASE, adapter),
        "device": "cuda" if has_gpu() else "cpu",
        "dtype": "float32",
        "template": "project",
    }


def test_smoke_of_an_instruct_model_with_its_own_prompt(
    unsloth_module, tmp_path, capsys, monkeypatch
):
    import torch

    monkeypatch.chdir(tmp_path)
    turns = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    shutil.copytree(BASE, "instruct")
    (tmp_path / "instruct" / "chat_template.jinja").write_text(turns)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    command = ["evaluate", "--models", "x=instruct", "--benchmarks", "arithmetic", "--smoke"]
    try:
        assert main(command) == 0
        assert has_gpu() or torch.get_num_threads() == 1, "more only wait for each other"
    finally:
        torch.set_num_threads(threads)
    assert "x: chat template: the model's own (instruct is an instruct model)" in (
        capsys.readouterr().out
    )
    file = tmp_path / "runs" / "evaluation-smoke" / "samples" / "arithmetic" / "x.jsonl"
    assert len(read_samples(file)) == 4
    settings = read_settings(file)["settings"]
    assert settings["template"] == "model"
    assert settings["sampling"]["max_completion_length"] == 64
    # The set goes on with its own template, and is refused to the other.
    assert main([*command, "--n", "3"]) == 0
    assert len(read_samples(file)) == 6
    assert main([*command, "--template", "project"]) == 2
    assert 'template was "model" and is "project"' in capsys.readouterr().err


def test_a_second_run_loads_no_model_and_says_the_same(evaluated, adapter, monkeypatch, capsys):
    from sage_unsloth.models import loading as models

    before = json.loads((evaluated / "report.json").read_text())
    monkeypatch.setattr(models, "load_policy", lambda *a, **k: pytest.fail("nothing is missing"))
    assert main(arguments(evaluated, adapter)) == 0
    text = capsys.readouterr().out
    assert "24 completions, 24 of them are in" in text
    after = json.loads((evaluated / "report.json").read_text())
    assert after["table"] == before["table"] and after["pass_at_k"] == before["pass_at_k"]


def test_more_samples_go_on_from_there(evaluated, adapter, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(evaluated, out)
    assert main([*arguments(out, adapter), "--n", "6"]) == 0
    text = capsys.readouterr().out
    assert "36 completions, 24 of them are in" in text
    file = "samples/arithmetic/base.jsonl"
    assert read_samples(out / file)[:12] == read_samples(evaluated / file)
    assert json.loads((out / "report.json").read_text())["table"][0]["samples"] == 6


def test_compare_says_the_same_of_the_same_sets(evaluated, tmp_path, capsys):
    assert (
        main(["compare", str(evaluated), "--out", str(tmp_path / "c"), "--against", "tuned"]) == 0
    )
    shown = capsys.readouterr().out
    first, second = (
        json.loads((f / "report.json").read_text()) for f in (evaluated, tmp_path / "c")
    )
    assert first["table"] == second["table"]
    forth = first["differences"]["arithmetic"]["tuned - base"]
    back = second["differences"]["arithmetic"]["base - tuned"]  # another minus the one asked for
    for k, difference in forth.items():
        assert back[k]["mean"] == pytest.approx(-difference["mean"])
        assert back[k]["low"] == pytest.approx(-difference["high"])
    assert "base - tuned: pass@1" in shown and "solved at least once in 4 samples" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--temperature", "0.5"], "sampling.temperature was 1.0 and is 0.5"),
        (["--temperature", "0"], "temperature must be > 0"),
        (["--n", "0"], "num_samples must be >= 1, got 0"),
        (["--problems", "0"], "--problems must be >= 1"),
        (["--benchmarks", "nope"], "a benchmark is one of"),
        (["--benchmarks", "mine=/nowhere.jsonl"], "there is none at /nowhere.jsonl"),
        (["--benchmarks", "arithmetic", "arithmetic"], "needs models and different benchmarks"),
        (["--models", "base"], "a model must be NAME=MODEL"),
        (["--template", "model"], 'template was "project" and is "model"'),
        (["--models", f"a={BASE}", f"a={BASE}"], "models with the same name must differ"),
        (["--models", f"a={BASE}+/nowhere"], "must be a folder with adapter_config.json"),
        (["--against", "other"], "--against must be one of base, tuned, got 'other'"),
        (["--train", "/nowhere.jsonl"], "--train FILE: data must be a file, but there is none"),
    ],
)
def test_bad_input_is_named_and_nothing_is_drawn(evaluated, adapter, capsys, change, message):
    file = evaluated / "samples" / "arithmetic" / "base.jsonl"
    before = file.read_bytes()
    assert main([*arguments(evaluated, adapter), *change]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") or "\nerror: " in error
    assert message in error
    assert file.read_bytes() == before


def test_a_name_that_is_no_model_is_refused_before_hours_of_drawing(adapter, tmp_path, capsys):
    assert main(arguments(tmp_path / "new", adapter, "--against", "other")) == 2
    assert "--against must be one of base, tuned, got 'other'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_sets_that_cannot_be_compared(evaluated, tmp_path, capsys):
    file = evaluated / "samples" / "arithmetic" / "base.jsonl"
    for name, change, message in (
        ("cut", lambda lines: lines[:-1], "must have 4 samples, but 'arithmetic-"),
        (
            "problem",
            lambda lines: [line for line in lines if '"arithmetic-67x5"' not in line],
            "every problem must have samples, but 1 of",
        ),
        (
            "grader",
            lambda lines: [line.replace('"math ', '"old ') for line in lines],
            "must be graded alike",
        ),
        (
            "gold",
            lambda lines: [line.replace('"gold": "', '"gold": "1') for line in lines],
            "must have the same problems to be compared",
        ),
        ("line", lambda lines: [*lines[:2], "{\n", *lines[3:]], "line 3 of"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        copy = folder / "base.jsonl"
        copy.write_text("".join(change(file.read_text().splitlines(keepends=True))))
        recorded = json.loads(settings_path(file).read_text())
        settings_path(copy).write_text(json.dumps(recorded))
        other = folder / "other.jsonl"
        shutil.copy(file, other)
        recorded["settings"]["model"] = "other"
        settings_path(other).write_text(json.dumps(recorded))
        assert main(["compare", str(other), str(copy), "--out", str(tmp_path / "c")]) == 2
        assert message in capsys.readouterr().err
    # Drawn otherwise, and the same set again under another name of the file.
    folder = tmp_path / "again"
    folder.mkdir()
    for change, message in (({}, "must have different weights"), ({"temperature": 0.5}, "alike")):
        again = folder / f"base{len(change)}.jsonl"
        shutil.copy(file, again)
        recorded = json.loads(settings_path(file).read_text())
        recorded["settings"]["sampling"] |= change
        settings_path(again).write_text(json.dumps(recorded))
        assert main(["compare", str(file), str(again), "--out", str(tmp_path / "c")]) == 2
        assert message in capsys.readouterr().err
    recorded["settings"] |= json.loads(settings_path(file).read_text())["settings"]
    recorded["settings"] |= {"model": "quantised", "weight_bits": 4}
    settings_path(again).write_text(json.dumps(recorded))
    assert main(["compare", str(file), str(again), "--out", str(tmp_path / "c")]) == 2
    assert "differ in weight_bits: 16 and 4" in capsys.readouterr().err
    twice = ["compare", str(file), str(file.parent), "--out", str(tmp_path / "c")]
    assert main(twice) == 0, "a file that is named twice counts once"
    assert main(["compare", str(tmp_path / "nothing")]) == 2
    assert "must be a record set, or a folder" in capsys.readouterr().err


def test_an_adapter_for_another_base_is_refused(adapter, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(BASE, other)
    weights = load_file(other / "model.safetensors")
    check_adapter_fits(other, adapter)  # a copy with the same weights
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, other / "model.safetensors")
    assert model_identity(other) != model_identity(BASE)
    with pytest.raises(
        ValueError,
        match=rf"trained on, {BASE} for .*, and {other} has other .* Give {BASE}\+",
    ):
        check_adapter_fits(other, adapter)
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "hub/base"})
    )
    check_adapter_fits(other, moved)  # its base is not at hand, and the shapes fit
    weights["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"][
        :, :-1
    ].copy()
    save_file(weights, other / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"must fit its base, .*down_proj\.lora_A\.weight of shape \(4, 320\).*\(128, 319\)",
    ):
        check_adapter_fits(other, moved)
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, other / "model.safetensors")
    with pytest.raises(ValueError, match="no such layer"):
        check_adapter_fits(other, moved)


def test_an_adapter_whose_base_is_not_at_hand_is_said(adapter, tmp_path, caplog):
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "hub/base"})
    )
    check_adapter_fits(BASE, moved)
    assert "names hub/base as its base, which is not at hand" in caplog.text


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("sft=runs/a", ModelSpec(name="sft", path="runs/a")),
        ("g.1=org/model+runs/b", ModelSpec(name="g.1", path="org/model", adapter="runs/b")),
    ],
)
def test_models_by_hand(text, spec):
    assert parse_model(text) == spec


def test_a_folder_with_a_plus_in_its_name(tmp_path, monkeypatch):
    (tmp_path / "a+b").mkdir()
    (tmp_path / "a+b" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert parse_model("m=a+b") == ModelSpec(name="m", path="a+b")


def test_benchmarks_from_a_file_or_a_folder(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n' * 1)
    for benchmark in (
        parse_benchmark("mine", tmp_path),
        parse_benchmark(f"mine={tmp_path / 'mine.jsonl'}"),
    ):
        assert [row["answer"] for row in benchmark.rows] == ["2"]
    assert len(parse_benchmark("arithmetic", problems=7).rows) == 7


def samples(correct_PN, model, name="toy"):
    """A record set made by hand; problem p has the id "p"."""
    records = [
        {
            "problem_id": f"{p}",
            "sample": n,
            "grade": "correct" if right else "wrong",
            "num_tokens": 10 * (n + 1),
            "finish_reason": "length" if n == 0 else "stop",
        }
        for p, row in enumerate(correct_PN)
        for n, right in enumerate(row)
    ]
    return record_set(records, model, name, {"temperature": 1.0})


def test_report_by_hand(tmp_path):
    a = samples([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], "a")
    b = samples([[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]], "b")
    result = report_sets([a, b], tmp_path)
    row = result["table"][0]
    assert (row["pass@1"], row["pass@n"]) == (
        pytest.approx(3 / 12, abs=1e-4),
        pytest.approx(2 / 3, abs=1e-4),
    )
    assert (row["problems"], row["samples"], row["seeds"]) == (3, 4, 1)
    assert (row["tokens"], row["truncated"]) == (25, 0.25)
    assert "seed_mean" not in row, "four samples make no five parts"
    assert list(result["pass_at_k"]["toy"]["a"]) == ["1", "2", "4"]
    expected = (pass_at_k(4, 2, 2) + 0 + pass_at_k(4, 1, 2)) / 3
    assert result["pass_at_k"]["toy"]["a"]["2"]["mean"] == pytest.approx(expected)
    difference = result["differences"]["toy"]["b - a"]
    assert difference["1"]["mean"] == pytest.approx(5 / 12 - 3 / 12)
    assert result["coverage"]["toy"] == {
        "samples": 4,
        "solved": {"a": 2, "b": 2},
        "only": {"a": ["0"], "b": ["1"]},
    }
    text = report_text(result)
    assert "a 2 (1 alone), b 2 (1 alone)" in text and "b - a: pass@1 +0.167" in text
    written = list(csv.DictReader((tmp_path / "coverage.csv").open()))
    assert [(r["model"], r["problem"]) for r in written] == [("a", "0"), ("b", "1")]


def test_training_seeds_and_unequal_numbers_of_samples(tmp_path):
    first, second = samples([[1] * 10, [0] * 10], "a"), samples([[0] * 10, [0] * 10], "a")
    b = samples([[1] * 4 + [0] * 2, [1] + [0] * 5], "b")
    result = report_sets([first, second, b], tmp_path, against="b")
    rows = {row["model"]: row for row in result["table"]}
    assert rows["a"]["seeds"] == 2 and rows["a"]["deviation_over"] == "training seeds"
    assert (rows["a"]["seed_mean"], rows["a"]["seed_deviation"]) == (
        0.25,
        pytest.approx(0.3536, abs=1e-4),
    )
    assert rows["b"]["deviation_over"] == "5 parts of the samples"
    assert list(result["pass_at_k"]["toy"]["b"]) == ["1", "2", "4", "6"]
    assert list(result["differences"]["toy"]["a - b"]) == ["1", "2", "4", "6"]
    assert result["coverage"]["toy"]["samples"] == 6
    with pytest.raises(
        ValueError, match=r"training seeds of a .* as many samples each, got 10 and 6"
    ):
        report_sets([first, samples([[1] * 6, [0] * 6], "a")], tmp_path)


def test_a_comparison_keeps_the_order_of_the_evaluation(evaluated, tmp_path):
    """The first model is the one that the others are compared with."""
    folder = tmp_path / "evaluation"
    shutil.copytree(evaluated, folder)
    for names in (["tuned", "base"], ["base", "tuned"]):
        report = json.loads((folder / "report.json").read_text())
        report["table"].sort(key=lambda row: names.index(row["model"]))
        (folder / "report.json").write_text(json.dumps(report))
        assert main(["compare", str(folder), "--out", str(tmp_path / "comparison")]) == 0
        found = json.loads((tmp_path / "comparison" / "report.json").read_text())
        assert [row["model"] for row in found["table"]] == names
        assert list(found["differences"]["arithmetic"]) == [f"{names[1]} - {names[0]}"]


def test_the_order_of_problems_does_not_matter(tmp_path):
    a = samples([[1, 0], [0, 0], [1, 1]], "a")
    b = samples([[1, 1], [0, 0], [1, 0]], "b")
    order = [2, 0, 1]
    shuffled = dataclasses.replace(
        b, problems=tuple(b.problems[i] for i in order), correct=b.correct[order]
    )
    assert (
        report_sets([a, b], tmp_path)["differences"]
        == report_sets([a, shuffled], tmp_path)["differences"]
    )


def test_five_parts_by_hand():
    correct = np.zeros((2, 11), bool)
    correct[:, 0] = (
        True  # the first part alone has a right one; the eleventh sample belongs to none
    )
    row = deviation_over_seeds([samples(correct, "a")])
    assert row["seed_mean"] == 0.1 and row["seed_deviation"] == pytest.approx(
        np.std([0.5, 0, 0, 0, 0], ddof=1), abs=1e-4
    )


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="a on toy must have samples, but there are none"):
        record_set([], "a", "toy", {})


def test_difference_figure_is_drawn_from_its_table(tmp_path):
    curve = {k: Difference(0.1 * k, 0.05, 0.2, 0.9) for k in (1, 2, 4)}
    plot_differences({"x": {"b - a": curve}, "y": {"b - a": curve}}, tmp_path / "d.png", "note")
    rows = list(csv.DictReader((tmp_path / "d.csv").open()))
    assert [(r["panel"], r["k"]) for r in rows] == [(p, k) for p in "xy" for k in "124"]
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_sets_of_quantised_weights_are_sets_of_their_own():
    specs = [parse_model(f"base={BASE}", load_in_4bit=bits) for bits in (False, True)]
    plain, quantised = model_identities(specs)
    assert plain.pop("dtype") == "float32", "what is not quantised"
    assert "weight_bits" not in plain and quantised == plain | {"weight_bits": 4}


def test_the_engine_chosen_here():
    assert choose_engine() in BATCH_SIZES
    assert choose_engine(load_in_4bit=True) == "transformers"
    assert SamplingConfig().num_samples == 256


def test_one_seed_becomes_two_and_nothing_is_drawn_again(adapter, tmp_path, capsys):
    def run(*models):
        command = [
            "evaluate",
            "--models",
            *models,
            "--benchmarks",
            "arithmetic",
            "--problems",
            "2",
            "--n",
            "2",
            "--max-tokens",
            "12",
            "--out",
            str(tmp_path / "run"),
        ]
        assert main(command) == 0
        return capsys.readouterr().out

    one, two = f"seeds={BASE}", f"seeds={BASE}+{adapter}"
    assert "0 of them are in" in run(one)
    assert "8 completions, 4 of them are in" in run(one, two)
    for models in ((one, two), (two, one)):
        assert "8 completions, 8 of them are in" in run(*models), "in any order"
    files = sorted((tmp_path / "run" / "samples" / "arithmetic").glob("*.jsonl"))
    assert len(files) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--benchmarks", "arithmetic=some.jsonl"], "read from no file, got some.jsonl"),
        (["--batch", "0"], "batch_size must be >= 1, got 0"),
        (["--engine", "vllm"], "rollouts='vllm' is not available"),
        (["--engine", "vllm", "--load-in-4bit"], "4-bit weights need the engine transformers"),
        (
            ["--train", "TRAIN"],
            "--train FILE: a training set needs a column with its problems, as text (problem, "
            "question, prompt) or as turns (messages, conversation, prompt), but TRAIN has text",
        ),
        (["--models", "x=no/such-model"], "could not be loaded"),
    ],
)
def test_bad_requests_are_messages(adapter, tmp_path, more, message, capsys):
    if has_gpu() and "vllm" in more:
        pytest.skip("it may run here")
    train = tmp_path / "train.jsonl"
    train.write_text('{"text": "1+1"}\n')
    more = [str(train) if word == "TRAIN" else word for word in more]
    assert main(arguments(tmp_path / "run", adapter, *more)) == 2
    assert message.replace("TRAIN", str(train)) in capsys.readouterr().err


def test_many_cut_completions_are_named(tmp_path):
    """Of each problem the first sample is cut: one of four is much, one of twenty is not."""
    for n, cut in ((4, True), (20, False)):
        result = report_sets([samples([[1] * n, [0] * n], "base")], tmp_path)
        message = "More than 10% of the completions of base were truncated at the length limit"
        assert (message in report_text(result)) == cut


def test_the_table_fits_a_terminal(tmp_path):
    models = [samples([[1, 0, 1, 1, 0], [0] * 5], name) for name in ("SFT", "SAGE-Branch")]
    models += [samples([[0, 0], [1, 1]], name, "other") for name in ("SFT", "SAGE-Branch")]
    text = report_text(report_sets(models, tmp_path))
    assert text.count("95 %") == text.count("which says nothing about other problems") == 1
    lines = text.splitlines()
    assert lines[1:4] == [
        "model        pass@1                mean ±         pass@n                n",
        "SFT          0.300 [0.001, 0.993]  0.300 ± 0.274  0.500 [0.003, 0.997]  5",
        "SAGE-Branch  0.300 [0.001, 0.993]  0.300 ± 0.274  0.500 [0.003, 0.997]  5",
    ]
    assert lines[5:7] == [
        "model        tokens  cut    no answer",
        "SFT          30      0.200  0.000",
    ]


def test_the_library_prints_nothing(evaluated, adapter, caplog, capsys):
    caplog.set_level("INFO")
    sampling = read_settings(evaluated / "samples" / "arithmetic" / "base.jsonl")["settings"]
    config = SamplingConfig(num_samples=4, **sampling["sampling"])
    models = [
        ModelSpec(name="base", path=str(BASE)),
        ModelSpec(name="tuned", path=str(BASE), adapter=str(adapter)),
    ]
    evaluate_models(models, [parse_benchmark("arithmetic", problems=3)], evaluated, config)
    assert "24 completions, 24 of them are in" in caplog.text
    assert not capsys.readouterr().out
