"""The recipes of `docs/own_data.md` and `docs/train.md` from the command line, with the tiny
model.
"""

import json
import re
import shlex

import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.export.exporter import export
from sage_unsloth.models.templates import choose_format
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.models.trained import read_run
from sage_unsloth.prompts import prompt_format, render_prompt
from sage_unsloth.runs.files import read_json, read_jsonl

ANSWER = ["--answer-pattern", "#### (.+)"]
COUNTS = r"(\d+) rows to train on, (\d+) held out, (\d+) left out"
LENGTHS = ["--set", "max_prompt_length=200", "max_completion_length=16"]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """Rows in the form of GSM8K, short enough for the tiny model."""
    rows = [
        {"question": f"{n} pens in a box, {n} boxes?", "answer": f"{n}*{n}={n * n}\n#### {n * n}"}
        for n in range(2, 42)
    ]
    file = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def sft_run(gsm8k, tmp_path_factory, unsloth_module):
    """SFT on worked solutions, with tags of its own."""
    out = str(tmp_path_factory.mktemp("runs") / "sft")
    command = ["sft", "--model", "arithmetic-base", "--out", out, "--smoke", "--held-out", "2"]
    command += ["--data", gsm8k, "--columns", "problem=question", "solution=answer", *ANSWER]
    assert main([*command, "--tags", "think-answer", "--set", "max_length=400"]) == 0
    return out


def train(out, *more):
    return main(["train", "--out", str(out), "--smoke", "--algorithm", "grpo", *LENGTHS, *more])


@pytest.mark.long
def test_a_file_in_gsm8ks_form_trains_and_evaluates_in_the_format_of_its_sft(
    gsm8k, sft_run, tmp_path, capsys
):
    run = read_json(f"{sft_run}/run.json")["settings"]
    assert run["prompt"]["reasoning"] == ["<think>", "</think>"]
    assert len(read_jsonl(f"{sft_run}/held-out/after.jsonl")) == 2 * 4
    origin = read_json(f"{sft_run}/run.json")["data"]
    assert origin["path"] == gsm8k and len(origin["sha256"]) == 64 and origin["rows"] == 40
    assert origin["columns"] == {"problem": "question", "solution": "answer", "answer": "answer"}
    assert origin["filters"]["whole row <= 400 tokens"] == 40

    out = tmp_path / "grpo"
    data = ["--data", gsm8k, *ANSWER]
    assert train(out, "--from", sft_run, *data) == 0
    told = capsys.readouterr().out
    assert told.endswith(
        "HELD_OUT.jsonl stands for a file of questions that were not trained on.\n"
    )
    assert "answer pattern matches" in told and "Data: gsm8k.jsonl; sha256 " in told
    assert read_json(out / "run.json")["data"]["filters"]["answer can be graded"] == 40
    assert read_json(out / "run.json")["settings"]["prompt"] == run["prompt"]
    assert read_jsonl(out / "completions.jsonl")[0]["answer"] in {str(n * n) for n in range(2, 42)}
    # Another format than the chain's is refused, with both.
    assert train(tmp_path / "other", "--from", sft_run, *data, "--tags", "boxed") == 2
    error = capsys.readouterr().err
    assert "of its training, --tags think-answer for" in error and "got --tags boxed" in error

    command = ["evaluate", "--models", f"sft={sft_run}", f"grpo={out}", "--smoke"]
    command += ["--out", str(tmp_path / "eval"), "--benchmarks", f"mine={gsm8k}", *ANSWER]
    assert main(command) == 0
    for name in ("sft", "grpo"):
        settings = read_json(tmp_path / "eval" / "samples" / "mine" / f"{name}.settings.json")
        assert settings["settings"]["prompt"]["solution"] == ["<answer>", "</answer>"]
        assert settings["provenance"][0]["answer_pattern"] == "#### (.+)"
        drawn = settings["settings"]["sampling"]
        assert drawn["min_p"] == read_json(out / "run.json")["settings"]["min_p"] == 0
    assert "sampled as in training: top_p 1, min_p 0." in capsys.readouterr().out
    assert main([*command, "--tags", "boxed"]) == 2


def run_next(capsys, **files):
    """Run the command that the last one ended with, with files in place of what stands for them."""
    *_, line = [x for x in capsys.readouterr().out.splitlines() if x.startswith("Next: ")]
    for name, file in files.items():
        line = line.replace(name, str(file))
    next_, python, m, module, *words = shlex.split(line)
    assert [next_, python, m, module] == ["Next:", "python", "-m", "sage_unsloth"]
    assert main(words) == 0, line
    return words


@pytest.mark.long
def test_the_printed_next_commands_run_to_the_end(tmp_path, unsloth_module, capsys, monkeypatch):
    """SFT, RL and evaluation of a task whose references are tests, with lengths of its own."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "question": f"add {n}",
            "worked": f"<start_working_out>w<end_working_out>\n```python\ndef f(): return {n}\n```",
            "tests": [f"assert f() == {n}"],
        }
        for n in range(2, 42)
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["problem=question", "solution=worked", "answer=tests"]
    command = ["sft", "--model", "arithmetic-base", "--out", "runs/sft", "--smoke"]
    command += ["--data", str(file)]
    command += ["--columns", *names, "--verifier", "python", "--set", "max_length=400"]
    assert main(command) == 0
    taught = read_json("runs/sft/run.json")["data"]
    assert taught["columns"]["answer"] == "tests"
    train = run_next(capsys)
    assert train[:2] == ["train", "--algorithm"]
    assert train[train.index("--max-prompt-length") + 1] == "200"
    settings = read_json("runs/sage-branch/run.json")["settings"]
    assert settings["verifier"].startswith("python ") and settings["min_p"] == 0
    evaluate = run_next(capsys, **{"HELD_OUT.jsonl": file})
    assert evaluate[evaluate.index("--min-p") + 1] == f"{settings['min_p']:g}"
    assert evaluate[evaluate.index("--temperature") + 1] == f"{settings['temperature']:g}"
    (record, *_) = read_jsonl("runs/evaluation-smoke/samples/held-out/sage-branch.jsonl")
    assert record["grader"].startswith("python ")


@pytest.mark.long
def test_an_export_carries_the_prompt_of_its_run(sft_run, tmp_path):
    out = export(read_run(sft_run), "merged", tmp_path / "export")
    prompt = prompt_format(None, ["think-answer"])
    assert choose_format(out) == prompt
    assert render_prompt(load_tokenizer(out), "1+1=?") == (
        f"{prompt.system}<|endoftext|>1+1=?<think>"
    )
    card = (out / "README.md").read_text()
    assert "The answer is between `<answer>` and `</answer>`" in card
    assert "    Place it between <think> and </think>." in card
    assert "| file | gsm8k.jsonl |" in card and "| answer pattern | #### (.+) |" in card


def test_a_chat_file_and_boxed_answers_without_a_system_prompt(tmp_path, unsloth_module, capsys):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}]
    file = tmp_path / "chat.jsonl"
    rows = [
        {"messages": [turns[0], turns[1] | {"content": f"{n}+{n}=?"}], "answer": 2 * n}
        for n in range(2, 30)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "grpo"
    options = ["--system-prompt", "none", "--tags", "boxed"]
    assert train(out, "--from", "arithmetic-base", "--data", str(file), *options) == 0
    prompt = read_json(out / "run.json")["settings"]["prompt"]
    assert prompt == {"system": None, "reasoning": None, "solution": None}
    assert read_jsonl(out / "completions.jsonl")[0]["prompt"].endswith("=?")
    assert train(out, "--from", "arithmetic-base", "--data", str(file)) == 2, "resumed otherwise"
    assert "prompt.solution was null and is" in capsys.readouterr().err


@pytest.mark.long
def test_a_task_of_reasoning_gym(tmp_path, unsloth_module):
    out = tmp_path / "gym"
    data = ["--data", "reasoning-gym:chain_sum", "--limit", "40"]
    assert train(out, "--from", "arithmetic-base", *data) == 0
    first = read_jsonl(out / "completions.jsonl")[0]
    assert json.loads(first["answer"])["task"] == "chain_sum"
    assert first["grader"].startswith("reasoning-gym")


def test_held_out_rows_that_cannot_be_graded_are_trained_on_and_counted(
    tmp_path, unsloth_module, capsys
):
    units = [" § x" if n % 3 else "" for n in range(2, 42)]
    rows = [
        {"problem": f"{n}+{n}=?", "solution": f"{n}+{n}", "answer": f"{2 * n}{unit}"}
        for n, unit in zip(range(2, 42), units, strict=True)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["sft", "--model", "arithmetic-base", "--out", str(tmp_path / "sft"), "--smoke"]
    command += ["--data", str(file), "--held-out", "8", "--set", "max_length=400"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    left, kept, dropped = map(int, re.search(COUNTS, shown).groups())
    assert left + kept + dropped == 40 and 0 < kept < 8
    assert f"{8 - kept} of the rows to train on were to be held out, but math cannot" in shown


def test_a_solution_without_an_answer_begins_where_the_prompt_ends(gsm8k, tmp_path, capsys):
    command = ["sft", "--model", "arithmetic-base", "--out", str(tmp_path / "sft"), "--smoke"]
    command += ["--data", gsm8k, "--columns", "solution=answer"]
    assert main(command) == 2
    assert "must begin with that, but row 0 begins with '2*2=4" in capsys.readouterr().err
