"""A setting is written once: options, help, tables, records and checks follow from its field."""

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest

from sage_unsloth.__main__ import main, make_parser
from sage_unsloth.models.lora import LoraSettings
from sage_unsloth.runs.settings import (
    GROUPS,
    config_settings,
    names_where,
    parse_settings,
    settings_tables,
)
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.setting_options import expand_config, recorded_command
from sage_unsloth.training.sft_config import SftConfig

STAGES = {"train": RlvrConfig, "sft": SftConfig}


def options(command, *words):
    parsed = make_parser().parse_args([command, *words])
    return parse_settings(parsed.settings, STAGES[command])


@pytest.mark.smoke
@pytest.mark.parametrize("command", STAGES)
def test_help_lists_every_setting_with_its_default_and_meaning(command):
    """Without numerics or PyTorch, in little more than Python needs to start."""
    code = (
        "import contextlib, sys, time\n"
        "from sage_unsloth.__main__ import main\n"
        f"with contextlib.suppress(SystemExit): main([{command!r}, '--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'rich'} & {*sys.modules}\n"
        "print(sorted(heavy), time.process_time(), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.split())
    heavy, seconds = text.rsplit("|", 1)
    assert heavy.endswith("[]") and float(seconds) < 0.5
    joined = re.sub(r"\s", "", text)  # argparse breaks lines within words too
    for name, one in config_settings(STAGES[command]).items():
        assert f"--{name.replace('_', '-')}" in joined, name
        assert re.sub(r"\s", "", one.text) in joined, name
        assert f"default:{re.sub(r'[ ]', '', one.default_text)}" in joined, name
    places = [text.index(f" {group}: ") for group in GROUPS if f" {group}: " in text]
    assert places == sorted(places) and len(places) >= 6


def test_an_option_is_the_setting_of_that_name():
    given = options("train", "--beta", "0.1", "--lora.rank", "16", "--max-steps=3")
    assert given == {"beta": 0.1, "lora": LoraSettings(rank=16), "max_steps": 3}
    assert options("train", "--set", "beta=0.2", "--beta", "0.1") == {"beta": 0.1}
    assert options("train", "--beta", "0.1", "--set", "beta=0.2") == {"beta": 0.2}
    switches = {
        ("--load-in-4bit",): True, ("--no-load-in-4bit",): False, ("--load-in-4bit", "false"): False
    }  # fmt: skip
    for words, value in switches.items():
        assert options("sft", *words) == {"load_in_4bit": value}
    assert options("train", "--micro-batch-size", "none") == {"micro_batch_size": None}
    assert options("train") == {}, "only what was given, so that preset and algorithm count"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--betta", "0.1"], r"--betta 0.1. Did you mean --beta?"),
        (["train", "--model", "x"], "Did you mean --from?"),
        (["sft", "--from", "x"], "Did you mean --model?"),
        (["evaluate", "--models", "a=b", "--benchmarks", "aime", "--data", "x"],
         "Did you mean --path?"),
        (["evaluate", "--models", "a=b", "--benchmarks", "aime", "--limit", "3"],
         "Did you mean --problems?"),
        (["analyze", "runs", "--data", "x"], "Did you mean --path?"),
        (["train", "--problems", "3"], "Did you mean --limit?"),
        (["train", "--lr", "1e-5"], "Did you mean --learning-rate?"),
        (["train", "--gradient-accumulation-steps", "2"], "Did you mean --micro-batch-size?"),
        (["train", "--lora-rank", "2"], "Did you mean --lora.rank?"),
        (["evaluate", "--models", "a=b", "--benchmarks", "aime", "--max-completion-length", "3"],
         "Did you mean --max-tokens?"),
    ],
)  # fmt: skip
def test_an_unknown_option_names_the_near_one(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loss-type", "gpro"], r"loss_type must be one of grpo, .*. Did you mean grpo?"),
        (["--max-steps", "many"], "max_steps must be a value like 1000, got 'many'"),
        (["--max_steps", "0"], "max_steps must be > 0, got 0"),
        (["--epsilon", "2"], r"epsilon must be in \[0, 1\], got 2"),
        (["--top-entropy-quantile", "0"], r"must be in \(0, 1\] because it is a share"),
        (["--lora.rank", "0"], "rank must be >= 1, got 0"),
        (["--max-grad-norm", "-1"], "max_grad_norm must be >= 0"),
    ],
)
def test_a_value_out_of_its_range_is_refused(words, message, tmp_path, capsys):
    command = ["train", "--from", "arithmetic-base", "--out", str(tmp_path / "run")]
    assert main([*command, *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_choices_are_those_of_the_code_that_reads_them():
    """They stand as literals in the config, so that help needs no PyTorch."""
    from sage_unsloth.methods.choices import CREDITS, KL_PLACES
    from sage_unsloth.methods.penalties import KL_ESTIMATORS
    from sage_unsloth.objective.loss import LOSS_TYPES
    from sage_unsloth.prompts import TEMPLATES
    from sage_unsloth.sampling.engine_choice import ROLLOUTS
    from sage_unsloth.trainers.backends import BACKENDS
    from sage_unsloth.training.number_formats import PRECISIONS
    from sage_unsloth.training.stage import TRACKERS

    hints = get_type_hints(RlvrConfig)
    assert {name: {*get_args(hints[name])} for name in (
        "loss_type", "kl_estimator", "credit", "kl_in", "backend", "template", "rollouts",
        "precision", "report_to",
    )} == {
        "loss_type": {*LOSS_TYPES}, "kl_estimator": {*KL_ESTIMATORS}, "credit": {*CREDITS},
        "kl_in": {*KL_PLACES}, "backend": {*BACKENDS}, "template": {*TEMPLATES},
        "rollouts": {*ROLLOUTS, "server"}, "precision": {*PRECISIONS}, "report_to": {*TRACKERS},
    }  # fmt: skip


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_field_says_what_it_is_on_a_line(stage):
    table = settings_tables(stage)
    for one in fields(stage):
        assert one.metadata["group"] in GROUPS and one.metadata["text"]
        assert f"{one.name}: {one.metadata['text']}" in stage.__doc__
    for name, item in config_settings(stage).items():
        limits = f" ({item.limits})" if item.limits else ""
        if "." not in name:
            assert f"{name}: {item.text}{limits}.\n" in stage.__doc__
        assert f"| `--{name.replace('_', '-')}` |" in table
    assert config_settings(stage)["seed"].limits == ""
    assert {*names_where(stage, "free")} >= {"save_steps", "report_to"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'beta = 0.1\nfrom = "m"\n[lora]\nrank = 16\n[columns]\nproblem = "q"\n'),
        ("a.yaml", "beta: 0.1\nfrom: m\nlora:\n  rank: 16\ncolumns: {problem: q}\n"),
        ("a.json", '{"beta": 0.1, "from": "m", "lora": {"rank": 16}, "columns": {"problem": "q"}}'),
    ],
)
def test_a_file_of_settings_stands_for_its_options(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    words = expand_config(["train", "--beta", "0.3", "--config", str(tmp_path / name)])
    parsed = make_parser().parse_args(words)
    assert (parsed.start, parsed.columns) == ("m", ["problem=q"])
    given = {"beta": 0.3, "lora": LoraSettings(rank=16)}  # the command line wins
    assert parse_settings(parsed.settings, RlvrConfig) == given


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (None, "", "must name a file, got"),
        ("a.yaml", "beta: [", "must be YAML"),
        ("a.yaml", "- beta", "must hold names and values"),
        ("run.json", '{"settings": {}, "environment": {}}', "was not written by one"),
        ("run.json", '{"settings": {}, "environment": {}, "command": ["sft"]}', "record of `sft`"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(tmp_path, name, text, message, capsys):
    file = tmp_path / (name or "none.yaml")
    if name:
        file.write_text(text)
    assert main(["train", "--config", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_record_repeats_its_run(tmp_path):
    """What was recorded wins over what another machine's presets would decide."""
    words = ["train", "--from", "m", "--out", "runs/a", "--reward", "answer", "--beta=0.1"]
    config = replace(RlvrConfig(), beta=0.1, load_in_4bit=True, lora=LoraSettings(rank=4))
    record = {
        "settings": json.loads(json.dumps({f.name: getattr(config, f.name) for f in fields(config)},
                                          default=vars)),
        "free_settings": {}, "environment": {}, "command": recorded_command(words),
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(record))
    again = expand_config(["train", "--config", str(tmp_path / "run.json"), "--out", "runs/b"])
    parsed = make_parser().parse_args(again)
    assert (parsed.start, parsed.rewards, parsed.out) == ("m", ["answer"], "runs/b")
    assert replace(RlvrConfig(), **parse_settings(parsed.settings, RlvrConfig)) == config


def test_options_without_a_value_are_switched_by_a_file(tmp_path):
    for value, expected in (("true", ["--allow-unconfined"]), ("false", [])):
        (tmp_path / "a.yaml").write_text(f"allow_unconfined: {value}\nsmoke: {value}\n")
        words = expand_config(["train", "--config", str(tmp_path / "a.yaml")])
        assert [word.replace("_", "-") for word in words if "unconfined" in word] == expected
        assert make_parser().parse_args([*words, "--from", "m"]).smoke is bool(expected)
