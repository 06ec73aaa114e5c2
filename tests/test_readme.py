"""What the README names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def section(title):
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_promise_names_tests_that_exist():
    rows = [line for line in section("What you can rely on").splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| promise |")]
    assert len(promises) > 20
    assert not re.search(r"[A-Z]{4,}LINE", README), "a place to be filled in"
    for row in promises:
        named = re.findall(r"`((?:test_\w+\.py)?::test_\w+)`", row.split(" | ")[-1])
        assert named and named[0].startswith("test_"), row
        assert len(named) == row.split(" | ")[-1].count("`") // 2, row
        file = None
        for name in named:
            file, test = name.split("::")[0] or file, name.split("::")[1]
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_every_module_is_in_the_tree():
    listed = re.findall(r"^ {4}(\w+\.py) ", section("The package"), re.MULTILINE)
    modules = {path.name for path in (ROOT / "sage_unsloth").glob("[!_]*.py")}
    assert len(listed) == len(set(listed)) and set(listed) == modules
