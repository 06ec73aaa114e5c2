"""The parsers of `evaluate` and `compare`: their defaults and help are those of the code."""

import argparse
import json
import re
import subprocess
import sys

import pytest

from sage_unsloth.evaluation.command import add_compare, add_evaluate
from sage_unsloth.problems.benchmarks import NAMES
from sage_unsloth.sampling.engine_choice import ROLLOUTS
from sage_unsloth.sampling.engines import BATCH_SIZES, SamplingConfig

REQUIRED = ["evaluate", "--models", "a=b", "--benchmarks", "arithmetic"]


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_evaluate(commands), add_compare(commands)
    return parser


def test_the_defaults_are_those_of_the_code(parser):
    found, sampling = parser.parse_args(REQUIRED), SamplingConfig()
    flags = ("n", "top_k", "max_tokens", "seed")
    fields = ("num_samples", "top_k", "max_completion_length", "seed")
    assert [getattr(found, flag) for flag in flags] == [getattr(sampling, f) for f in fields]
    assert found.temperature is found.top_p is found.min_p is None, "the run's, or the code's"
    assert found.batch is None and found.engine == "auto" and found.out == "runs/evaluation"
    assert parser.parse_args(["compare", "x"]).sets == ["x"]
    assert all(callable(parser.parse_args(line).act) for line in (REQUIRED, ["compare", "x"]))


def test_the_help_names_the_numbers_of_the_code(parser, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # argparse breaks lines at hyphens
    with pytest.raises(SystemExit):
        parser.parse_args(["evaluate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert BATCH_SIZES["transformers"] == SamplingConfig().batch_size
    for engine, size in BATCH_SIZES.items():
        assert f"{size:,} with {engine}" in text
    assert f"--engine {{{','.join(ROLLOUTS)}}}" in text
    assert f"samples of each problem (default: {SamplingConfig().num_samples})" in text
    assert (
        f"else {SamplingConfig().temperature})" in text
        and f"else {SamplingConfig().min_p})" in text
    )
    (named,) = re.findall(r"(aime, .*?, reasoning-gym:TASK) and others", text)
    assert set(named.split(", ")) <= set(NAMES)


@pytest.mark.parametrize("room", ["evaluation", "analysis"])
def test_a_parser_is_built_without_the_libraries_of_its_command(room):
    code = (
        f"import json, sys, sage_unsloth.{room}.command\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "unsloth", "transformers", "numpy", "matplotlib", "rich", "scipy", "tqdm"}
    assert not heavy & set(json.loads(done.stdout))
