"""What the page on the architecture says of the way to the gradient, and of the walk of a run."""

import importlib
import inspect
import re
from pathlib import Path

from sage_unsloth.__main__ import COMMANDS
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import ORDER

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 600


def section():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.split("## From a guide to the gradient\n")[1].split("\n## ")[0]


def files():
    """In the order of the page."""
    links = re.findall(r"^\d\. \[`[^`]+`\]\(\.\./([^)]+)\)", section(), re.M)
    return [ROOT / link for link in links]


def test_the_way_is_five_files_that_can_be_read_at_once():
    assert len(files()) == 5
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files())
    assert lines <= MOST_LINES


def test_the_line_that_is_the_method_stands_where_the_page_says():
    line = "ref_logps = ref_logps + log_guide"
    assert section().count(line) == 1
    sources = [file.read_text(encoding="utf-8") for file in files()]
    assert [source.count(line) for source in sources] == [0, 0, 0, 0, 1]


def test_what_the_page_says_is_replaced_is():
    """Under the names that the seam has for them."""
    seam = files()[3].read_text(encoding="utf-8")
    for name in ("names.FUNCTION", "names.ENTROPY_MASK", "names.SCORER_WITH_ENTROPY"):
        assert name in seam
    code = section().split("```text\n")[1].split("```")[0].splitlines()
    called = re.findall(r"(\w+?)(…?)\(", "\n".join(code[1:4]))
    scorer, mask, function = called
    assert names.SCORER_WITH_ENTROPY.startswith(scorer[0]) and scorer[1]
    assert (mask[0], function[0]) == (names.ENTROPY_MASK, "apply")
    assert f"{names.FUNCTION}.apply" in code[3] and "replaced" in code[3]
    assert 8 <= len(code) <= 12


MOST_HOPS, MOST_MODULES = 15, 10


def test_the_walk_of_a_run_is_short_and_as_the_page_tells_it():
    """Each function is there, and one before it, or its module, calls it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = page.split("## From the command to the loss\n")[1].split("\n## ")[0]
    walk = re.findall(r"^\| `([\w.]+)\.(\w+)` \|", told, re.MULTILINE)
    assert 10 <= len(walk) <= MOST_HOPS
    assert len({module for module, _ in walk}) <= MOST_MODULES
    assert ("training.command", "add_train") in COMMANDS  # by which __main__ finds the command
    command = importlib.import_module("sage_unsloth.training.command")
    above = inspect.getsource(command.add_train)
    for module, name in walk:
        whole = importlib.import_module(f"sage_unsloth.{module}")
        start = module == "__main__" and name == "main"
        assert start or re.search(rf"\b{name}\(|act={name}\)", above), f"{module}.{name}"
        assert callable(getattr(whole, name))
        above += inspect.getsource(whole)


def test_the_listeners_of_the_page_are_those_of_the_table():
    """As many for each method, in the order of `listening.ORDER`."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = page.split("## Who listens to a trainer\n")[1].split("```text\n")[1].split("```")[0]
    found = [line.split("  ", 1)[1].split(" → ")[:-1] for line in block.splitlines()]
    methods = (names.ROLLOUT, names.REWARDS, names.COMPUTE_LOSS, names.STEP)
    assert [len(line) for line in found] == [len(ORDER[name]) for name in methods]
    assert all(line[-1].strip() for line in found)
