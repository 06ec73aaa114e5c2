"""What the README names is there."""

import json
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


def test_its_figures_are_those_of_the_committed_results():
    text = section("What you can rely on")
    results = ROOT / "data" / "results" / "reliability"
    kills, soak, fuzz, versions = (
        json.loads((results / f"{name}.json").read_text())
        for name in ("kills", "soak", "fuzz", "versions")
    )
    lives, starts = len(kills["lives"]), sum(life["starts"] for life in kills["lives"])
    assert kills["wrong"] == []
    assert f"{kills['moments']} random moments of {lives} runs ({starts} starts)" in text
    for command in kills["commands"]:
        assert f"`{command}`" in text

    def number(value, sign="+"):
        return f"{value:{sign}.2f}".replace("-", "−").replace("0.", ".")

    for name in ("rss", "rss_children"):
        middle, low, high = map(number, soak["series"][name]["per_1000_steps"])
        assert f"{middle} " in text and f"[{low}, {high}]" in text
    cpu = soak["series"]["cpu_per_step"]
    assert (
        f"{number(cpu['first_tenth'], '')} s in the first tenth, {number(cpu['last_tenth'], '')} "
        f"s in the last" in text
    )
    assert all(soak["flat"].values()) and soak["steps"] > 4900
    graded, late = fuzz["answers"] - fuzz["grades"]["timed out"], fuzz["grades"]["timed out"]
    assert f"{fuzz['answers']:,} fuzzed answers: {graded:,} graded, {late} ended" in text
    assert f"slowest took {fuzz['slowest'][0]['seconds']:.0f} s" in text
    memory = list(fuzz["parent_peak_mib"].values())
    assert f"memory {memory[0]:.0f} → {memory[1]:.0f} MiB" in text
    held = {row["passed"] for row in versions["rows"] if row["outcome"] == "holds"}
    assert held == {149} and "(149 tests each)" in text


def test_every_module_is_in_the_tree():
    listed = re.findall(r"^ {4}(\w+\.py) ", section("The package"), re.MULTILINE)
    modules = {path.name for path in (ROOT / "sage_unsloth").glob("[!_]*.py")}
    assert len(listed) == len(set(listed)) and set(listed) == modules
