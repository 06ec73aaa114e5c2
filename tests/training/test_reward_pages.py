"""The page on rewards and verifiers: its files are written, their code and commands are run."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.stage import read_metrics

DOCS = Path(__file__).parents[2] / "docs"
REWARDS, VERIFIERS = 0, 1  # parts of the page


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Does what a page says, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def do(part):
        page = "own_reward.md"
        text = (DOCS / page).read_text(encoding="utf-8").split("\n## Verifiers\n")[part]
        commands = []
        for language, block in re.findall(r"^```(python|bash)\n(.*?)^```$", text, re.M | re.S):
            if language == "bash":
                for line in block.replace("\\\n", " ").splitlines():
                    words = shlex.split(line)
                    assert words[:3] == ["python", "-m", "sage_unsloth"], line
                    assert main(words[3:]) == 0, line
                    commands.append(words[3])
                continue
            if file := re.match(r"# (\w+\.py)\n", block):
                Path(file[1]).write_text(block)
            exec(compile(block, page, "exec"), {"__name__": "__main__"})
        return commands

    return do


@pytest.mark.long
def test_the_page_on_rewards(follow, unsloth_module, capsys):
    assert follow(REWARDS) == ["train", "evaluate"]
    *_, start, mine = capsys.readouterr().out.splitlines()
    assert start.startswith("start ") and mine.startswith("mine ")
    for row in read_jsonl("runs/two-rewards/completions.jsonl"):
        expected = (row["grade"] == "correct") * (1 - min(len(row["completion"]), 200) / 200)
        assert row["rewards"]["brevity"] == pytest.approx(expected)
        assert row["reward"] == pytest.approx(row["rewards"]["answer"] + 0.1 * expected)
    assert all("reward/brevity" in row for row in read_metrics("runs/two-rewards"))


@pytest.mark.long
def test_the_page_on_verifiers(follow, unsloth_module, capsys):
    assert follow(VERIFIERS) == ["train", "evaluate", "train"]
    run = json.loads(Path("runs/code/run.json").read_text())["settings"]
    assert run["verifier"].startswith("python 3")
    rows = read_jsonl("runs/code/completions.jsonl")
    assert {row["grader"].split(",")[0] for row in rows} == {"python 3"}
    (records,) = Path("runs/code-evaluation/samples").rglob("code.jsonl")
    assert {row["grader"].split(",")[0] for row in read_jsonl(records)} == {"python 3"}
    own = read_jsonl("runs/own-verifier/completions.jsonl")
    assert own[0]["grader"].startswith("my_verifiers:close_enough ")
    assert "correct" in capsys.readouterr().out
