"""The command line: settings by name, exit codes, and messages instead of tracebacks."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sage_unsloth
from sage_unsloth.__main__ import IN_A_CLONE, main, make_parser
from sage_unsloth.models.loading import LoraSettings
from sage_unsloth.runs.settings import config_settings, parse_settings
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.setting_options import SettingAction, naming_options
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
    for text in ("q_proj,v_proj", "q_proj, v_proj,", "('q_proj', 'v_proj')"):
        lora = parse_settings([f"lora.targets={text}"], SftConfig())["lora"]
        assert lora == LoraSettings(targets=("q_proj", "v_proj"))
    with pytest.raises(ValueError, match="targets must not be empty"):
        parse_settings(["lora.targets="], SftConfig())


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps", "takes NAME=VALUE, got 'max_steps'"),
        ("steps=3", "takes one of max_steps, .*, got 'steps'"),
        ("max_steps=many", "max_steps must be a value like 1000, got 'many'"),
        ("max_steps=1.5", "max_steps must be a value like 1000, got 1.5"),
        ("max_steps=True", "must be a value like 1000, got True"),
        ("load_in_4bit=1", "must be a value like False, got 1"),
        ("micro_batch_size=1.5", "must be a value like None"),
        ("lora=3", "takes one of"),
        ("micro_batch_size=True", "must be a value like None, got True"),
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
        (["train", "--from", "runs/none", "--algorithm", "grpo"], "there is no folder runs/none"),
        (
            ["train", "--from", "arithmetic-base", "--set", "rollouts=sglang"],
            "rollouts must be one of",
        ),
        (
            ["train", "--from", "arithmetic-base", "--set", "reference=base"],
            "needs a start with an adapter",
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


CONTRADICTIONS = {
    (
        "sage-branch",
        "beta=0",
    ): "beta must not be 0 with a guide, because the guide shapes",
    ("sage-teacher", "seed=1"): "a teacher is given exactly with a guide that needs",
    ("grpo", "teacher=arithmetic-base"): "got teacher='arithmetic-base' without such a guide",
    ("grpo", "kl_estimator=k4"): "kl_estimator must be one of",
    ("grpo-forward-kl", "beta=0"): "chooses the KL penalty",
    ("grpo", "credit=sequence"): "kl_estimator must be one of",
    ("grpo-exact", "beta=0"): "beta not 0",
    ("sage-token", "credit=sequence kl_estimator=k3-is"): "reads no later token",
    ("grpo", "loss_type=ppo"): "loss_type must be one of",
    ("grpo", "num_generations=1"): "num_generations must be >= 2",
    ("grpo", "reference=base"): "needs a start with an adapter",
    ("zzz", "seed=1"): "an algorithm must be one of",
}


def test_contradictions_are_refused_before_data_or_unsloth_are_loaded(tmp_path):
    """One process for all of them; the file of data is not there, and nobody looks for it."""
    command = ["--from", "arithmetic-base", "--path", "none.jsonl", "--out", str(tmp_path / "run")]
    cases = [
        ["train", "--algorithm", name, *command, "--set", *settings.split()]
        for name, settings in CONTRADICTIONS
    ]
    cases.append(["sft", "--model", "arithmetic-base", *command[2:], "--set", "epochs=0"])
    code = (
        "import json, sys\n"
        "from sage_unsloth.__main__ import main\n"
        "found = []\n"
        f"for case in {cases!r}:\n"
        "    found.append([main(case), 'unsloth' in sys.modules])\n"
        "    print('---', file=sys.stderr)\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[2, False]] * len(cases)
    messages = done.stderr.split("---\n")
    expected = [*CONTRADICTIONS.values(), "epochs must be > 0, got 0"]
    for case, message, text in zip(cases, expected, messages, strict=False):
        assert message in text, case
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", IN_A_CLONE)
def test_a_command_that_is_not_installed_says_where_it_is(name, capsys):
    assert main([name, "--smoke"]) == 2
    message = capsys.readouterr().err
    assert f"Run it from a clone: python -m research.{name}" in message
    assert len(message.splitlines()) == 1


def options_of(command):
    """The options of a command by name, without the dashes."""
    return {action.dest: action for action in parsers()[command]._actions}


def parsers():
    """Name -> parser of every command, those of a clone too."""
    of_a_clone = {
        name: importlib.import_module(f"research.{name}.command").make_parser()
        for name in IN_A_CLONE
    }
    return make_parser()._subparsers._group_actions[0].choices | of_a_clone


def numbers_in_help():
    """Where the numbers in help texts come from."""
    from research.cost.sizes import LARGE, SMALL
    from sage_unsloth.planning.presets import CARDS
    from sage_unsloth.problems.corpora import RL_ROWS
    from sage_unsloth.sampling.engines import BATCH_SIZES, SamplingConfig

    return {
        ("sft", "limit"): {RL_ROWS},  # of dapo
        ("train", "limit"): {RL_ROWS},
        ("evaluate", "batch"): {*BATCH_SIZES.values()},
        ("evaluate", "temperature"): {SamplingConfig().temperature},  # where no run says another
        ("evaluate", "top_p"): {SamplingConfig().top_p},
        ("evaluate", "min_p"): {SamplingConfig().min_p},
        ("evaluate", "load_in_4bit"): {4, 16},  # bits, and GiB of a card
        ("plan", "memory"): {int(name) for name in CARDS},
        ("cost", "small"): {SMALL.hidden, SMALL.length},
        ("cost", "hidden"): {LARGE.hidden},
        ("cost", "length"): {LARGE.length},
        ("cost", "vocabulary"): {LARGE.vocabulary, SMALL.vocabulary},
        ("cost", "batch"): {LARGE.batch, SMALL.batch},
    }


def test_numbers_in_help_texts_are_those_of_the_code():
    """A number that stands by itself, other than 0 and the option's own default."""
    expected, found = numbers_in_help(), {}
    for command in parsers():
        for name, option in options_of(command).items():
            if isinstance(option, SettingAction):  # written by the dataclass
                continue
            text = (option.help or "").replace("%(default)s", "")
            numbers = re.findall(r"(?<![\w.:=-])\d[\d,]*(?:\.\d+)?(?![\w-])", text)
            values = {float(number.rstrip(",").replace(",", "")) for number in numbers} - {0}
            if values:
                found[command, name] = values
    assert found == expected


@pytest.mark.parametrize(
    ("command", "function"), [("sft", "run_sft"), ("train", "run_rlvr"), ("export", "export")]
)
def test_defaults_of_options_are_those_of_the_functions(command, function):
    from sage_unsloth import training
    from sage_unsloth.export import exporter

    parameters = inspect.signature(
        getattr(training if command in ("sft", "train") else exporter, function)
    ).parameters
    shared = {name: option for name, option in options_of(command).items() if name in parameters}
    shared = {
        name: option
        for name, option in shared.items()
        if parameters[name].default is not inspect.Parameter.empty
    }
    assert shared
    for name, option in shared.items():
        assert option.default == parameters[name].default, name


@pytest.mark.parametrize("words", [["train", "--list"], ["plan", "--model", "qwen2.5-math-7b"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(words):
    """As `| head -1` does."""
    command = subprocess.Popen(
        [sys.executable, "-m", "sage_unsloth", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    command.stdout.close()  # before the command has written a word
    assert command.stderr.read() == b""
    assert command.wait() == 141


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ("beta=0", ". Give --beta 0.05, or train without a guide"),
        ("kl_estimator=k2 beta=0", ". Give --beta 0.05, or train without a guide"),
        ("epsilon=2", "epsilon must be in [0, 1], got 2"),
    ],
)
def test_a_message_of_a_command_names_its_own_options(settings, remedy, tmp_path, capsys):
    command = ["train", "--from", "arithmetic-base", "--out", str(tmp_path / "run")]
    assert main([*command, "--set", *settings.split()]) == 2
    error = capsys.readouterr().err
    assert remedy in error and "GRPOConfig" not in error


def test_lists_and_plans_fit_80_columns(capsys):
    for words in (
        ["train", "--list"],
        ["plan"],
        ["plan", "--model", "r1-distill-qwen-7b", "--memory", "24"],
        ["plan", "--model", "arithmetic-base"],
    ):
        main(words)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80, words


SEEN_FIRST = """
import sys

class Stops:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numpy", "transformers", "datasets", "unsloth", "trl", "matplotlib"):
            sys.stdout.flush()
            print("HEAVY", name, file=sys.stderr, flush=True)
            import os
            os._exit(0)

sys.meta_path.insert(0, Stops())
from sage_unsloth.__main__ import main
main(sys.argv[1:])
"""
"""Ends the process where it first looks for a library that takes seconds."""


@pytest.mark.parametrize(
    "command",
    [
        "quickstart",
        "study --task arithmetic --methods grpo maxrl",
        "sft --model arithmetic-base",
        "train --algorithm grpo --from arithmetic-base",
        "ask --model arithmetic-base 1+1",
        "evaluate --models a=arithmetic-base --benchmarks arithmetic",
        "compare none.jsonl",
        "analyze none",
        "export none --to adapter",
        "doctor",
    ],
)
def test_a_line_stands_before_anything_heavy_is_imported(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SEEN_FIRST, *command.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    first = done.stdout.splitlines()[0]
    assert first == f"{command.split()[0]}: loading libraries.", done.stdout


def test_an_error_stands_behind_the_header_that_it_follows(tmp_path):
    """Both go to one pipe, as into a file by `nohup`."""
    command = ["train", "--algorithm", "grpo", "--from", "arithmetic-base", "--path", "none.jsonl"]
    done = subprocess.run(
        [sys.executable, "-m", "sage_unsloth", *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("grpo from arithmetic-base"))
    error = next(i for i, line in enumerate(lines) if line.startswith("error:"))
    assert 0 < header < error == len(lines) - 1, done.stdout


OF_OTHER_PROGRAMS = {
    "--jinja",  # llama.cpp
    "--output-dir",  # inspect
    "--log_samples",  # lm-eval
    "--no-log-samples",  # inspect
    "--multi_gpu",  # accelerate
    "--nproc-per-node",  # torchrun
}
OF_FUNCTIONS = {"keeps", "norm"}


def test_no_message_names_an_option_or_a_setting_that_does_not_exist():
    parsers = make_parser().get_default("parsers")
    of_command = {name: {*p._option_string_actions} for name, p in parsers.items()}
    everything = OF_OTHER_PROGRAMS.union(*of_command.values())
    alone = {"analysis": of_command["analyze"], "export": OF_OTHER_PROGRAMS | of_command["export"]}
    settings = OF_FUNCTIONS | set(config_settings(RlvrConfig)) | set(config_settings(SftConfig))
    unknown = []
    for file in Path(sage_unsloth.__file__).parent.rglob("*.py"):
        tree, options = ast.parse(file.read_text()), alone.get(file.parent.name, everything)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if not isinstance(text, str) or " " not in text or id(node) in docstrings:
                continue
            named = re.findall(r"(?<![\w(-])--[a-z][\w.-]*\w(?!\w*:)", text)  # no colour of a page
            advised = re.findall(r"\b[Ss]et ([a-z_]+)=", text)
            unknown += [(file.name, name) for name in {*named} - options | {*advised} - settings]
    assert not unknown


def test_an_advised_setting_is_written_as_an_option_once():
    with pytest.raises(ValueError) as error, naming_options(RlvrConfig, by_set=True):
        raise ValueError("a rule, got 0. Set beta=0.1, or give --set seed=2")
    assert str(error.value) == "a rule, got 0. Give --set beta=0.1, or give --set seed=2"
