"""Every command that a finished one prints as the next is run, until none is printed."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from sage_unsloth.problems import arithmetic

pytestmark = pytest.mark.long
NEXT = r"(?:^|Ready\. )Next: python -m (.*)$"


def run(folder, words):
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def follow(folder, *words):
    """The names of the commands that were run, beginning with this one, and the last output."""
    names, command = [], ["sage_unsloth", *words]
    while command:
        said = run(folder, command)
        names.append(command[1])
        assert len(names) < 8, "it never ends"
        found = re.findall(NEXT, said, re.MULTILINE)
        command = shlex.split(found[-1]) if found else []
    return names, said


def test_after_sft(tmp_path):
    names, _ = follow(tmp_path, "sft", "--model", "arithmetic-base", "--smoke", "--out", "runs/sft")
    assert names[:3] == ["sft", "train", "evaluate"]


def test_after_the_quickstart(tmp_path):
    said = run(tmp_path, ["sage_unsloth", "quickstart", "--smoke", "--out", "runs/quick start"])
    (page,) = re.findall(r": (.*comparison\.html)$", said, re.MULTILINE)
    assert (tmp_path / page).is_file()
    (words,) = re.findall(NEXT, said, re.MULTILINE)
    names, said = follow(tmp_path, *shlex.split(words)[1:])
    assert names[0] == "analyze" and "Written to" in said


def test_after_training_on_questions_of_ones_own(tmp_path):
    """With columns, tags and a verifier; the file that is not trained on is where it is named."""
    rows = [
        {"ask": row["problem"], "total": row["answer"], "work": row["solution"]}
        for row in arithmetic.problems("sft")[:40]
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("mine.jsonl", "HELD_OUT.jsonl"):
        (tmp_path / name).write_text(text)
    own = ["--data", "mine.jsonl", "--columns", "problem=ask", "answer=total", "solution=work"]
    names, _ = follow(
        tmp_path,
        *("sft", "--model", "arithmetic-base", "--smoke", "--out", "runs/sft", *own),
        *("--verifier", "text"),
    )
    assert names[:3] == ["sft", "train", "evaluate"]
