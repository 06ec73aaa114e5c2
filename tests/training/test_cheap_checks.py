"""What can be refused before Unsloth is imported, is: that import takes longer than all checks."""

import json
import os
import subprocess
import sys

import pytest

from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.training.starting import starting_point

ROW = {"prompt": "1+1=?", "solution": "2"}
WORKED = {"problem": "1+1=?", "generated_solution": "two", "expected_answer": "2"}


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def begun_run(folder, **settings):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"settings": settings, "free_settings": {}}))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return str(folder)


@pytest.fixture
def cases(tmp_path):
    """Commands and what is wrong with each."""
    good = write_rows(tmp_path / "good.jsonl", ROW)
    worked = write_rows(tmp_path / "worked.jsonl", WORKED)
    names = write_rows(tmp_path / "names.jsonl", {"question": "1+1=?", "answer": "2"})
    empty = write_rows(tmp_path / "empty.jsonl", ROW | {"solution": " "})
    other = begun_run(tmp_path / "other", stage="rlvr", learning_rate=1.0)
    of_sft = begun_run(tmp_path / "of-sft", stage="sft", learning_rate=1.0)
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "thesis.tex").touch()
    new, held, inside = (str(tmp_path / name) for name in ("new", "held", "good.jsonl/run"))
    train = ["train", "--from", "arithmetic-base"]
    sft = ["sft", "--model", "arithmetic-base"]
    return [
        ([*train, "--out", new, "--path", "none.jsonl"], "there is none at none.jsonl"),
        ([*train, "--out", new, "--path", names], "row 0 lacks 'prompt'"),
        ([*train, "--out", new, "--path", empty], "'solution' must be a non-empty text"),
        ([*train, "--out", new, "--path", good], "prompts_per_step=8 rows, got 1"),
        ([*train, "--out", new, "--set", "report_to=mlflow"], "report_to must be one of"),
        ([*train, "--out", other], "learning_rate was 1.0 and is 0.002"),
        ([*train, "--out", of_sft], 'stage was "sft" and is "rlvr"'),
        ([*train, "--out", str(stranger)], "holds 'thesis.tex' and no run.json"),
        ([*train, "--out", held], "one process at a time may write"),
        ([*train, "--out", inside], "must be folders"),
        ([*sft, "--out", new, "--path", names], "row 0 lacks 'problem'"),
        ([*sft, "--out", new, "--set", "report_to=mlflow"], "report_to must be one of"),
        ([*sft, "--out", other, "--path", worked], 'stage was "rlvr" and is "sft"'),
        ([*sft, "--out", held], "one process at a time may write"),
        ([*sft, "--out", inside], "must be folders"),
    ]


MINE = """
import os
from sage_unsloth import BranchGuide
from sage_unsloth.training import Algorithm

guided = Algorithm(name="guided", description="", guide=BranchGuide())

class Tuple:
    needs = ("entropies",)
    def log_guide(self, signals, **schedule): ...

tuple_guide = Tuple()

def brief(completions):
    return [1.0]

def typo(completions):
    return [turns[-1]["contents"] for turns in completions]

def easy(completions, level):
    return level

def alone(answer):
    return True
"""
SECRET = """
import os
if os.environ.get("GRADING_PASSWORD") is None:
    raise RuntimeError("no password")

def check(answer, gold):
    return True
"""


@pytest.fixture
def own_cases(tmp_path):
    """Bad input of a user's own, one of each kind."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "secret.py").write_text(SECRET)
    (tmp_path / "table.xls").write_text("question,answer\n1+1=?,2\n")
    rows = [{"question": f"{n}+{n}=?", "answer": f"#### {2 * n}"} for n in range(20)]
    write_rows(tmp_path / "rows.jsonl", *rows)
    train = ["train", "--from", "arithmetic-base", "--smoke", "--out", "new"]
    good = [*train, "--data", "rows.jsonl", "--answer-pattern", "#### (.+)"]
    of_file = [*train, "--data", "rows.jsonl"]
    return [
        ([*train, "--data", "table.xls"], "must end in one of .jsonl, .json, .parquet, .csv, got"),
        ([*of_file, "--columns", "answer=anser"], "has no 'anser', only question, answer. --col"),
        ([*of_file, "--answer-pattern", "@ (.+)"], "matches 0 % of the 20 rows of rows.jsonl"),
        ([*good, "--limit", "-3"], "limit must be >= 1, got -3"),
        ([*good, "--reward", "mine:brief"], "each of the 2 completions, but returned 1"),
        ([*good, "--reward", "mine:typo"], "raised KeyError: 'contents' at mine.py:18, in typo."),
        (
            [*good, "--reward", "mine:easy"],
            "easy needs level, but the data have answer and TRL",
        ),
        ([*good, "--verifier", "mine:alone"], "mine:alone takes (answer): too many positional"),
        ([*good, "--verifier", "secret:check"], "Import nothing large in its file, such as torch"),
        (
            [*good, "--algorithm", "mine:guided", "--set", "beta=0"],
            "beta must not be 0 with",
        ),
        ([*good, "--algorithm", "mine:tuple_guide"], "a guide must have a method log_guide"),
        ([*good, "--eval-file", "rows.jsonl"], "eval_steps above 0, got 20 rows"),
        (
            [*good, "--reward", "mine:typo", "--set", "eval_steps=1"],
            "needs a reward that checks the answer",
        ),
        ([*good, "--set", "betta=1"], r"got 'betta'. Did you mean beta?"),
    ]


def test_bad_input_of_ones_own_is_refused_before_unsloth_is_imported(own_cases, tmp_path):
    refused_cheaply(own_cases, tmp_path)
    assert not (tmp_path / "new").exists()


def test_bad_input_is_refused_before_unsloth_is_imported(cases, tmp_path):
    with exclusive_lock(tmp_path / "held"):
        refused_cheaply(cases, None)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "other" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def refused_cheaply(cases, folder):
    """Each command says what is expected and ends with 2, in a process that loads nothing."""
    code = (
        "import json, sys\n"
        "from sage_unsloth.__main__ import main\n"
        f"for words in {[words for words, _ in cases]!r}:\n"
        "    code = main(words)\n"
        "    loaded = {'unsloth', 'transformers'} & {*sys.modules}\n"
        "    print('---', code, *loaded, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"GRADING_PASSWORD": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    messages = done.stderr.split("--- 2\n")
    assert len(messages) == len(cases) + 1, done.stderr
    for (words, expected), message in zip(cases, messages, strict=False):
        assert expected in message, words


def test_a_folder_that_is_not_there_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder runs/sft. Train it first \(python"):
        starting_point("runs/sft", "sft")
