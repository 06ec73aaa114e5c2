"""The models of an evaluation, as a person names them on the command line."""

import json
import shutil

import pytest

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.evaluation.named_models import parse_model
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.weights import model_identity
from sage_unsloth.planning.presets import MODELS

BASE = data_folder() / BASE_MODEL


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which `run` and `adapter` make theirs; names are relative to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, stage, model_path, *results, **settings):
    """A run's folder with what its stage leaves."""
    folder.mkdir(parents=True)
    record = {"settings": {"stage": stage} | settings} | (
        {"model_path": model_path} if model_path else {}
    )
    (folder / "run.json").write_text(json.dumps(record))
    for result in results:
        if result == "model":
            shutil.copytree(BASE, folder / result)
        else:
            adapter(folder / result, model_path)


def adapter(folder, base):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))


def spec(path, adapter=None, in_4bit=False):
    return ModelSpec(name="x", path=str(path), adapter=adapter, load_in_4bit=in_4bit)


@pytest.mark.smoke
def test_a_preset_is_not_asked_of_the_hub():
    assert parse_model(f"x={BASE_MODEL}") == spec(BASE)
    for name, preset in MODELS.items():
        if name != BASE_MODEL:
            assert parse_model(f"x={name}") == spec(preset.hub_id)


def test_runs_adapters_and_folders(folder):
    run(folder / "sft", "sft", str(BASE), "adapter", "model")
    run(folder / "grpo", "rlvr", "sft/model", "adapter")
    run(folder / "full", "rlvr", str(BASE), "model")
    run(folder / "again", "rlvr", "sft/model", "adapter", "model")  # merged for a second stage
    adapter(folder / "alone", "org/model")
    for text, expected in {
        "sft": spec("sft/model"),
        "grpo": spec("sft/model", "grpo/adapter"),
        "full": spec("full/model"),
        "again": spec("sft/model", "again/adapter"),
        "grpo/adapter": spec("sft/model", "grpo/adapter"),
        "sft/adapter": spec(BASE, "sft/adapter"),
        "alone": spec("org/model", "alone"),
        f"{BASE_MODEL}+alone": spec(BASE, "alone"),
        "sft+grpo": spec("sft/model", "grpo/adapter"),
        "sft/model+grpo/adapter": spec("sft/model", "grpo/adapter"),
        "org/model": spec("org/model"),
    }.items():
        assert parse_model(f"x={text}") == expected


def test_what_was_trained_in_4_bits_is_evaluated_in_4_bits(folder):
    """Of an SFT run its adapter on the 4-bit base, which is what was trained; its merged model is
    one in full precision.
    """
    run(folder / "sft", "sft", str(BASE), "adapter", "model", load_in_4bit=True)
    run(folder / "grpo", "rlvr", "sft/model", "adapter", load_in_4bit=True)
    run(folder / "plain", "rlvr", "sft/model", "adapter", load_in_4bit=False)
    adapter(folder / "exported", str(BASE))
    (folder / "exported" / "export.json").write_text('{"run": {"load_in_4bit": true}}')
    sft, grpo = (BASE, "sft/adapter"), ("sft/model", "grpo/adapter")
    plain, exported = ("sft/model", "plain/adapter"), (BASE, "exported")
    for text, as_trained, quantised, full in (
        ("sft", spec(*sft, True), spec(*sft, True), spec("sft/model")),
        ("sft/adapter", spec(*sft, True), spec(*sft, True), spec(*sft)),
        ("grpo", spec(*grpo, True), spec(*grpo, True), spec(*grpo)),
        ("sft/model+grpo", spec(*grpo, True), spec(*grpo, True), spec(*grpo)),
        ("sft/model", spec("sft/model"), spec("sft/model", None, True), spec("sft/model")),
        ("plain", spec(*plain), spec(*plain, True), spec(*plain)),
        ("exported", spec(*exported, True), spec(*exported, True), spec(*exported)),
    ):
        for asked, expected in ((None, as_trained), (True, quantised), (False, full)):
            assert parse_model(f"x={text}", load_in_4bit=asked) == expected, (text, asked)


def test_the_template_is_passed_on():
    assert parse_model(f"x={BASE_MODEL}", "model").template == "model"


def test_names_that_lead_nowhere(folder):
    run(folder / "runs" / "begun", "rlvr", str(BASE))
    run(folder / "runs" / "merging", "sft", str(BASE), "adapter")
    run(folder / "runs" / "unnamed", "rlvr", None, "adapter")
    run(folder / "runs" / "bench", "quickstart", None)
    run(folder / "runs" / "moved", "rlvr", "/nowhere/sft/model", "adapter")
    run(folder / "grpo", "rlvr", str(BASE), "adapter")
    (folder / "empty").mkdir()
    for text, message in {
        "runs": r"got runs. Give one of begun, bench, merging, moved, unnamed in it",
        "runs/begun": r"must be complete to be used, but runs/begun has neither",
        "runs/merging": r"must be complete to be used, but runs/merging has no model/ yet",
        "runs/unnamed": r"or as MODEL\+runs/unnamed/adapter \(evaluate\)",
        "runs/bench": "runs/bench is of another kind",
        "runs/moved": r"names '/nowhere/sft/model', which is not there. Give MODEL\+",
        "runs/moved/adapter": r"names '/nowhere/sft/model', which is not there. Give MODEL\+",
        "empty": "empty has none of these",
        "/nowhere": "there is no folder /nowhere",
        "./nowhere": r"there is no folder \./nowhere",
        "runs/a/model": "there is no folder runs/a/model",
        "grpo+grpo/adapter": "a model has one adapter at a time",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_model(f"x={text}")


def test_a_path_that_leads_to_another_projects_model_is_refused(folder, monkeypatch):
    trained_on = f"model {model_identity(BASE)['weights']}"
    run(folder / "a" / "grpo", "rlvr", "runs/sft", "adapter", model=trained_on)
    for project in ("a", "b"):
        shutil.copytree(BASE, folder / project / "runs" / "sft")
    config = folder / "b" / "runs" / "sft" / "config.json"
    config.write_text(config.read_text() + " ")  # another model
    monkeypatch.chdir(folder / "a")
    assert parse_model("x=grpo") == spec("runs/sft", "grpo/adapter")
    monkeypatch.chdir(folder / "b")
    for text in ("../a/grpo", "../a/grpo/adapter"):
        with pytest.raises(ValueError, match=r"has other weights here. Give MODEL\+\.\./a/grpo"):
            parse_model(f"x={text}")
