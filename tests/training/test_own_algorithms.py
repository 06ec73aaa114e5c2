"""Algorithms of one's own: `module:name`, entry points of installed packages, and what is recorded
of them. The recipes are those of `docs/algorithms.md`.
"""

import json
import re
from pathlib import Path

import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.advantage_rules import advantage_rule
from sage_unsloth.quickstart import _guide_record
from sage_unsloth.runs.record import refuse_other_settings
from sage_unsloth.training import algorithms
from sage_unsloth.training.algorithms import ALGORITHMS, algorithm_list, get_algorithm
from sage_unsloth.training.own_algorithms import brought_algorithms, own_code
from sage_unsloth.training.recipes import run_rlvr
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import recorded_guide

DOCS = Path(__file__).resolve().parents[2] / "docs"


def python_blocks():
    """Those of the page, before its part on algorithms of one's own, and those in it."""
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    parts = page.split("\n## Your own algorithm\n")
    return [re.findall(r"```python\n(.*?)```", part, re.S) for part in parts]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with the modules of both pages under names of this test's own."""
    number = abs(hash(tmp_path)) % 10**8
    before, own = python_blocks()
    modules = {f"algorithms_{number}": own[0]}
    modules[f"rules_{number}"] = next(block for block in before if "def first_success" in block)
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return [*modules]


@pytest.mark.smoke
def test_an_algorithm_is_found_by_its_module(here):
    lift = get_algorithm(f"{here[0]}:lift")
    assert (lift.name, lift.advantages, lift.beta, lift.guide.amount) == ("lift", "maxrl", 0.1, 0.3)
    Path("named.py").write_text(f"from {here[0]} import Lift\nguide = Lift()\nKind = Lift\n")
    of_guide = get_algorithm("named:guide")
    assert of_guide.guide == type(lift.guide)() and of_guide.advantages == "grpo"
    with pytest.raises(ValueError, match=r"of a guide, but named:Kind is <class"):
        get_algorithm("named:Kind")
    with pytest.raises(ValueError, match=r"must be a name of named .*, got 'lift'"):
        get_algorithm("named:lift")
    with pytest.raises(ValueError, match=r"must be importable, but no_such_module_of"):
        get_algorithm("no_such_module_of_mine:lift")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta must not be 0 with a guide, because the guide"),
        ({"teacher": "some/model"}, "exactly with a guide that needs 'teacher_logps'"),
        ({"advantages": "pass-at-k,k=9"}, "from 1 to 7 for advantages='pass-at-k'"),
        ({"advantages": "mine:first_success,bonus=big"}, "bonus of .* must be a number"),
    ],
)
def test_what_contradicts_it_is_an_error_before_anything_is_loaded(here, settings, message):
    if "mine" in (rule := settings.get("advantages", "")):
        settings = {"advantages": rule.replace("mine", here[1])}
    with pytest.raises(ValueError, match=message):
        run_rlvr("run", algorithm=f"{here[0]}:lift", start="arithmetic-base", **settings)
    assert not Path("run").exists()


def install(folder, package, entries, module=""):
    """A package of that name in `folder`, as an installer leaves it."""
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[sage_unsloth.algorithms]", *lines]))
    (folder / f"{package}.py").write_text(module)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    text = python_blocks()[1][0]
    install(folder, "lifting", {"lift": "lifting:lift", "grpo": "lifting:lift"}, text)
    install(folder, "breaking", {"broken": "breaking:x"}, "raise RuntimeError('no such card')")
    install(folder, "other", {"number": "other:x"}, "x = 3")
    monkeypatch.syspath_prepend(str(folder))
    brought_algorithms.cache_clear()
    yield
    brought_algorithms.cache_clear()


def test_what_packages_bring_is_listed_and_a_broken_one_is_named(packages):
    assert get_algorithm("lift").guide.amount == 0.3
    assert get_algorithm("grpo") is ALGORITHMS["grpo"]  # a package cannot take a name of the table
    with pytest.raises(ValueError, match=r"'broken' of breaking 1.2 .*RuntimeError: no such"):
        get_algorithm("broken")
    with pytest.raises(ValueError, match=r"'number' of other 1.2 .*must be an instance of Alg"):
        get_algorithm("number")
    with pytest.raises(ValueError, match=r"grpo-entropy, .*lift.*, or module:name .*mean 'lift'"):
        get_algorithm("lft")
    text = " ".join(algorithm_list().split())
    assert "lift advantages=maxrl, beta=0.1, guide=Lift(amount=0.3)" in text
    assert "by the advantages of maxrl from lifting 1.2" in text
    assert "broken cannot be used: RuntimeError: no such card from breaking 1.2" in text
    assert "grpo (lifting 1.2) cannot be used: the name grpo is of this package's table" in text
    # The table of the documents is of this package alone.
    assert "lifting" not in algorithms.algorithm_table()


def test_code_of_ones_own_is_recorded_by_its_file(here):
    lift = get_algorithm(f"{here[0]}:lift")
    assert own_code(None, "pkpo,k=4") == own_code(ALGORITHMS["sage-branch"].guide, "grpo") == {}
    before = own_code(lift.guide, f"{here[1]}:first_success")
    assert re.fullmatch(r"guide [0-9a-f]{16}, advantages [0-9a-f]{16}", before["code"])
    with Path(f"{here[1]}.py").open("a") as file:
        file.write("\n# changed\n")
    within = own_code(AdaptiveGuide(lift.guide, 0.01), "grpo")
    assert within["code"].startswith("guide.guide "), "within one of this package"
    after = own_code(lift.guide, f"{here[1]}:first_success")
    assert after["code"].split(",")[0] == before["code"].split(",")[0] and after != before
    with pytest.raises(ValueError, match="code was"):
        refuse_other_settings(Path("run"), before, after)
    with pytest.raises(ValueError, match="code was absent"):
        refuse_other_settings(Path("run"), {}, after)
    with pytest.raises(ValueError, match=r"code was .* and is absent"):
        refuse_other_settings(Path("run"), before, {})


def test_the_pages_rule_by_hand(here):
    import torch

    rule = advantage_rule(f"{here[1]}:first_success,bonus=0.5")
    found = rule(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]]))
    assert found.tolist() == [[1.25, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]
    assert RlvrConfig(advantages=rule.text).advantages == rule.text


@pytest.mark.long
def test_the_recipe_trains_and_resumes_with_the_same_code_alone(here, unsloth_module, capsys):
    words = ["train", "--algorithm", f"{here[0]}:lift", "--from", "arithmetic-base", "--out", "run"]
    words += ["--smoke", "--set", "preflight_prompts=0"]
    assert main([*words, f"advantages={here[1]}:first_success"]) == 0
    recorded = json.loads(Path("run/run.json").read_text())["settings"]
    assert recorded["guide"] == "Lift(amount=0.3)" and recorded["beta"] == 0.1
    assert recorded["advantages"] == f"{here[1]}:first_success"
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert all("sage/guide_mean" in row and "advantages/dead_groups" in row for row in rows)
    assert main(words) == 2
    assert "advantages was" in capsys.readouterr().err
    with Path(f"{here[0]}.py").open("a") as file:
        file.write("\n# changed\n")
    assert main([*words, f"advantages={here[1]}:first_success"]) == 2
    assert "code was" in capsys.readouterr().err


class Plain:
    """A guide as docs/guides.md has it, without `__repr__`."""

    needs = frozenset()

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return signals.mask * 0.1


def test_a_plain_guide_within_another_has_the_same_record_in_every_process():
    record = recorded_guide(AdaptiveGuide(Plain(), 0.01))
    assert " at 0x" not in record and "Plain()" in record
    json.dumps(_guide_record(AdaptiveGuide(Plain(), 0.01)))
