"""The command `analyze` on folders as the stages leave them: what it finds, writes, prints, and
refuses.
"""

import argparse
import inspect
import json
import shutil
from dataclasses import asdict

import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.analysis import perplexity
from sage_unsloth.analysis.command import add_analyze
from sage_unsloth.analysis.report import analyze
from sage_unsloth.analysis.sources import Sources, find_sources, problem_texts
from sage_unsloth.analysis.tables import no_interval, phase_rows
from sage_unsloth.evaluation.record_tables import keep_texts
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.weights import model_identity
from sage_unsloth.problems import arithmetic
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.runs.files import append_jsonl

BASE = data_folder() / BASE_MODEL
ROWS = [row for row in arithmetic.problems("test") if row["family"] == "rare"][:3]
RIGHT = "17=20-3;<end_working_out><SOLUTION>1</SOLUTION>"
WRONG = "17=10+7;<end_working_out><SOLUTION>2</SOLUTION>"


def write_set(file, model, correct, n=4, benchmark="arithmetic", rows=ROWS, **identity):
    """A record set; of problem i the first correct[i] of n samples are right, by the rare way."""
    file.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": model,
        "benchmark": benchmark,
        "engine": "transformers",
        "sampling": {"temperature": 1.0},
    } | identity
    file.with_suffix(".settings.json").write_text(json.dumps({"format": 2, "settings": settings}))
    append_jsonl(
        file,
        [
            {
                "model": model,
                "problem_id": row["id"],
                "sample": s,
                "gold": row["answer"],
                "grader": "g",
                "num_tokens": 9,
                "completion": RIGHT if s < count else WRONG,
                "finish_reason": "stop",
                "grade": "correct" if s < count else "wrong",
            }
            for row, count in zip(rows, correct, strict=True)
            for s in range(n)
        ],
    )
    return file


def write_run(
    folder,
    steps=6,
    touched=0.5,
    guide="BranchGuide(ratio=0.3, threshold=0.0, q_min=0.6, q_max=1.4)",
):
    folder.mkdir(parents=True, exist_ok=True)
    append_jsonl(
        folder / "metrics.jsonl",
        [
            {
                "step": s,
                "reward": 0.1 * s,
                "grad_norm": 1.0,
                "kl/ref_k3": 0.01,
                "sage/share_touched": touched,
            }
            for s in range(1, steps + 1)
        ],
    )
    settings = {"stage": "rlvr", "guide": guide, "temperature": 1.0, "max_steps": steps, "seed": 1}
    (folder / "run.json").write_text(json.dumps({"settings": settings, "model_path": str(BASE)}))
    return folder


def add_adapter(folder):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), lora).save_pretrained(
        folder / "adapter"
    )


@pytest.fixture
def quickstart(unsloth_module, tmp_path):
    """What a quickstart leaves, of records and logs."""
    run = tmp_path / "quick"
    for model, correct in {"SFT": [1, 1, 1], "GRPO": [4, 0, 2], "SAGE-Branch": [4, 3, 2]}.items():
        write_set(run / "samples" / f"{model.lower()}.jsonl", model, correct)
    write_run(run / "grpo", touched=0.0)
    write_run(run / "sage-branch")
    (run / "report.json").write_text('{"pass_at_k": {}}')
    (run / "sft").mkdir()
    append_jsonl(run / "sft" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    write_set(run / "grpo" / "preflight.jsonl", "policy", [0, 0, 0], benchmark="preflight")
    write_set(run / "sft" / "held-out" / "before.jsonl", "before", [0, 0, 0], benchmark="held-out")
    return run


def test_sources_of_a_quickstart(quickstart):
    assert "table" not in json.loads((quickstart / "report.json").read_text())
    found = find_sources([quickstart, quickstart / "grpo"])
    assert {name: folder.name for name, folder in found.runs.items()} == {
        "GRPO": "grpo",
        "SAGE-Branch": "sage-branch",
    }
    assert list(found.samples) == ["arithmetic"], "neither preflight nor held-out rows"
    assert list(found.samples["arithmetic"]) == ["SFT", "GRPO", "SAGE-Branch"]


def test_runs_take_the_name_under_which_their_weights_were_evaluated(unsloth_module, tmp_path):
    run = write_run(tmp_path / "runs" / "sage-branch")
    add_adapter(run)
    digest = model_identity(run / "adapter")["weights"]
    write_set(tmp_path / "e" / "a.jsonl", "ours", [1, 1, 1], weights="w", adapter=digest)
    write_set(tmp_path / "e" / "b.jsonl", "sage-branch", [1, 1, 1], weights="w", adapter="other")
    write_set(tmp_path / "e" / "c.jsonl", "ours", [1, 1, 1], weights="w", adapter="seed 2")
    found = find_sources([tmp_path])
    assert list(found.runs) == ["ours"]
    assert set(found.samples["arithmetic"]) == {"ours", "ours #2", "sage-branch"}


def test_perplexity_is_of_the_prompt_that_was_sampled(unsloth_module, tmp_path, monkeypatch):
    boxed = PromptFormat(system="Box it: \\boxed{}", reasoning=None, solution=None)
    write_set(tmp_path / "e" / "a.jsonl", "plain", [1, 1, 1])
    write_set(tmp_path / "e" / "b.jsonl", "boxed", [1, 1, 1], prompt=asdict(boxed))
    templates = []
    real = perplexity.score_records

    def watched(model, tokenizer, *others, **more):
        templates.append(tokenizer.chat_template)
        return real(model, tokenizer, *others, **more)

    monkeypatch.setattr(perplexity, "score_records", watched)
    command = ["analyze", str(tmp_path / "e"), "--out", str(tmp_path / "out"), "--responses", "1"]
    # A baseline that was trained with one of the two prompts scores both.
    shutil.copytree(BASE, tmp_path / "sft" / "model")
    settings = {"stage": "sft", "prompt": asdict(boxed), "template": "project"}
    (tmp_path / "sft" / "run.json").write_text(json.dumps({"settings": settings}))
    assert main([*command, "--perplexity", str(tmp_path / "sft" / "model")]) == 0
    assert ["Box it" in template for template in templates] == [False, True]


def test_a_set_that_is_not_graded_whole_is_refused(tmp_path):
    write_set(tmp_path / "a.jsonl", "base", [1, 1, 1])
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    del lines[0]["grade"], lines[0]["grader"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="1 of base on arithmetic are not"):
        analyze([tmp_path], tmp_path / "out")


@pytest.mark.long
def test_the_command_leaves_what_it_says(quickstart, tmp_path, capsys):
    add_adapter(quickstart / "sage-branch")
    out = tmp_path / "analysis"
    command = [
        "analyze",
        str(quickstart),
        "--out",
        str(out),
        "--against",
        "GRPO",
        "--pattern",
        "tag=<SOLUTION>",
    ]
    command += ["--page", "--perplexity", str(BASE), "--responses", "2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    for name in (
        "patterns.png",
        "patterns.csv",
        "dynamics.png",
        "dynamics_phases.csv",
        "perplexity.png",
        "perplexity.csv",
        "cases.html",
        "tokens.html",
        "tokens.png",
        "analysis.json",
    ):
        assert (out / name).stat().st_size > 100 and name in text, name
    result = json.loads((out / "analysis.json").read_text())
    found = result["benchmarks"]["arithmetic"]
    frequencies = {(row["pattern"], row["model"]): row for row in found["patterns"]["frequencies"]}
    rare = frequencies["rounding up (the rare way)", "GRPO"]
    assert (rare["frequency"]["mean"], rare["correct"], rare["problems"]) == (1.0, 6, 2)
    assert frequencies["tag", "SFT"]["shown"] == 3
    assert frequencies["splitting at the ten", "SFT"]["frequency"]["mean"] == 0
    assert found["pass_at_k"]["SAGE-Branch"]["1"]["mean"] == pytest.approx((1 + 3 / 4 + 2 / 4) / 3)
    assert found["cases"][0]["problem_id"] == ROWS[1]["id"], "3 against 0"
    assert found["perplexity"]["table"][0]["responses"] == 3 * 2
    lines = (out / "perplexity" / "GRPO.jsonl").read_text().splitlines()
    assert len(lines) == 6
    page = (out / "tokens.html").read_text()
    assert "SAGE-Branch, " in page and "GRPO, " not in page, "GRPO's guide changed nothing"
    assert "largest difference between SAGE-Branch and GRPO" in text
    assert "GRPO         1.000 [" in text
    # A second time nothing is scored again.
    assert main(command) == 0
    assert (out / "perplexity" / "GRPO.jsonl").read_text().splitlines() == lines


def test_the_default_number_of_responses_is_that_of_the_code():
    parser = argparse.ArgumentParser()
    add_analyze(parser.add_subparsers())
    found = parser.parse_args(["analyze", "runs/a"])
    assert found.responses == inspect.signature(analyze).parameters["responses"].default
    assert found.pattern == [] and callable(found.act)


def test_what_an_earlier_run_left_is_said_apart(tmp_path, capsys):
    write_set(tmp_path / "e" / "a.jsonl", "a", [1, 2, 3])
    write_set(tmp_path / "e" / "b.jsonl", "b", [1, 0, 3])
    command = ["analyze", str(tmp_path / "e"), "--out", str(tmp_path / "out")]
    assert main(command) == 0 and "Of an earlier run" not in capsys.readouterr().out
    (tmp_path / "e" / "b.jsonl").unlink(), (tmp_path / "e" / "b.settings.json").unlink()
    assert main(command) == 0
    text = capsys.readouterr().out
    assert f"Written to {tmp_path / 'out'}: analysis.json, patterns.csv, patterns.png\n" in text
    assert "Of an earlier run: cases.html\n" in text


def test_training_logs_alone_are_enough(tmp_path, capsys):
    write_run(tmp_path / "runs" / "one", steps=9)
    assert main(["analyze", str(tmp_path / "runs" / "one"), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "reward" in text and "0.2000 [" in text and "0.8000 [" in text
    assert "or for equal values" in text, "grad_norm is 1 in each step"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "analysis.json",
        "dynamics.csv",
        "dynamics.png",
        "dynamics_phases.csv",
    ]


def test_records_alone_are_enough_and_benchmarks_stay_apart(tmp_path, capsys):
    write_set(tmp_path / "e" / "a.jsonl", "a", [1, 2, 3])
    write_set(tmp_path / "e" / "b.jsonl", "a", [1, 2, 3], benchmark="my/own")
    assert main(["analyze", str(tmp_path / "e"), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "out" / "my-own" / "patterns.png").exists()
    assert (tmp_path / "out" / "arithmetic" / "patterns.png").exists()
    assert "proof by contradiction" in text and "rounding up" in text
    assert "Next:" not in text, "no run says which model could score them"


def test_the_token_page_of_a_run_alone_has_its_last_completions(
    unsloth_module, tmp_path, capsys, monkeypatch
):
    run = write_run(tmp_path / "run", guide="Shout 0x1")
    settings = json.loads((run / "run.json").read_text())
    settings["settings"]["max_completion_length"] = 48
    (run / "run.json").write_text(json.dumps(settings))
    add_adapter(run)
    command = ["analyze", str(run), "--page", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "the token page needs completions" in capsys.readouterr().err
    append_jsonl(
        run / "completions.jsonl",
        [
            {"step": step, "prompt": prompt, "completion": text, "answer": "8", "grade": grade}
            for step, prompt, text, grade in [
                (1, "1*8=?", "early", "wrong"),
                (6, "2*4=?", "no", "wrong"),
                (6, "2*4=?", "2*4=8", "correct"),
                (6, "3*4=?", "3*4=13", "wrong"),
            ]
        ],
    )
    assert main(command) == 2
    assert "Give your own with --guide module:name" in capsys.readouterr().err
    settings["command"] = ["train", "--algorithm", "loud:shout", "--smoke"]
    (run / "run.json").write_text(json.dumps(settings))
    assert main(command) == 2
    assert "Give your own with --guide loud:shout" in capsys.readouterr().err
    assert main([word for word in command if word != "--page"]) == 0
    assert "--guide loud:shout --page" in capsys.readouterr().out
    (tmp_path / "loud.py").write_text(
        "import torch\n"
        "class Shout:\n"
        "    needs = frozenset()\n"
        "    def log_guide(self, signals, *, step, max_steps, generator):\n"
        "        return torch.full_like(signals.policy_logps, 0.125) * signals.mask\n"
        "shout = Shout()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*command, "--guide", "loud:shout"]) == 0
    printed = capsys.readouterr().out
    assert "Next:" not in printed, "nothing can be added"
    page = (tmp_path / "out" / "tokens.html").read_text()
    assert "step 6, problem 1, sample 1, correct" in page and "2*4=?" in page
    assert "step 6, problem 2, sample 0, wrong" in page and "1*8=?" not in page
    (first, second) = json.loads((tmp_path / "out" / "analysis.json").read_text())["tokens"]
    assert "".join(first["tokens"][:-1]) == "2*4=8" and {*first["log_guides"]} == {0.125}
    assert len(second["tokens"]) == len("3*4=13") + 1, "with the end of the sequence"


def test_problems_of_an_own_benchmark_are_read_beside_its_records(tmp_path):
    write_set(tmp_path / "mine" / "a.jsonl", "a", [1, 2, 3], benchmark="mine")
    texts = {row["id"]: f"text of {row['id']}" for row in ROWS[:3]}
    keep_texts(tmp_path / "mine" / "a.jsonl", texts)
    assert problem_texts("mine", find_sources([tmp_path])) == texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "nobody"], "--against must be one of SFT, GRPO, SAGE-Branch, got 'nobody'"),
        (["--pattern", "let"], "--pattern takes NAME=REGEX, got 'let'"),
        (["--pattern", "let=("], "a pattern must be a regular expression"),
        (["--responses", "0"], "--responses must be >= 1, got 0"),
        (["--page"], "must be complete to be scored"),
        (["--perplexity", "none/there"], "could not be loaded"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(quickstart, options, message, tmp_path, capsys):
    command = ["analyze", str(quickstart), "--out", str(tmp_path / "out"), *options]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_folders_with_nothing_to_analyse_are_refused(tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    for path in (tmp_path, tmp_path / "none"):
        assert main(["analyze", str(path), "--out", str(tmp_path / "out")]) == 2
        assert "has none" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    append_jsonl(tmp_path / "sft" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    assert main(["analyze", str(tmp_path / "sft"), "--out", str(tmp_path / "out")]) == 2
    assert "an analysis needs RL runs" in capsys.readouterr().err
    command = ["analyze", str(run), "--out", str(tmp_path / "out")]
    assert main([*command, "--against", "a"]) == 2
    assert "--against must be a model of a record set, and none" in capsys.readouterr().err
    assert main([*command, "--perplexity", str(BASE)]) == 2
    assert "no folder has a record set" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_runs_of_one_name_are_refused(tmp_path):
    write_run(tmp_path / "a" / "grpo"), write_run(tmp_path / "b" / "grpo")
    with pytest.raises(ValueError, match="must have different names"):
        find_sources([tmp_path])


def test_problems_must_be_those_that_were_sampled():
    record = {"problem_id": ROWS[0]["id"], "gold": "0"}
    with pytest.raises(
        ValueError, match=f"answer '0', and arithmetic here has the answer '{ROWS[0]['answer']}'"
    ):
        problem_texts("arithmetic", Sources(samples={"arithmetic": {"m": [record]}}))
    with pytest.raises(ValueError, match="has no such problem"):
        missing = record | {"problem_id": "x"}
        problem_texts("arithmetic", Sources(samples={"arithmetic": {"m": [missing]}}))


def test_an_own_benchmark_is_read_from_its_file(tmp_path, capsys):
    """Where the records came without the texts."""
    rows = [{"ask": f"{n} + 1?", "is": n + 1} for n in range(3)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampled = [{"id": f"mine/{n}", "answer": f"{n + 1}"} for n in range(3)]
    for model, correct in {"a": [1, 2, 3], "b": [4, 0, 2]}.items():
        file = tmp_path / "e" / f"{model}.jsonl"
        write_set(file, model, correct, benchmark="mine", rows=sampled)
    command = ["analyze", str(tmp_path / "e"), "--out", str(tmp_path / "out")]
    columns = ["--columns", "problem=ask", "answer=is"]
    assert main([*command, *columns]) == 2
    assert "your own problems (NAME=FILE), got no benchmark" in capsys.readouterr().err
    assert main([*command, "--benchmarks", f"mine={tmp_path / 'mine.jsonl'}", *columns]) == 0
    assert "2 + 1?" in (tmp_path / "out" / "cases.html").read_text()


def test_phases_stand_beside_each_other():
    rows = [
        {"run": run, "phase": phase, "metric": metric, "mean": 1.0, "low": 0.5, "high": 2.0}
        for run in ("a", "b")
        for metric in ("grad_norm", "reward")
        for phase in ("early", "late")
        if not (run == "b" and phase == "late" and metric == "reward")
    ]
    table = phase_rows(rows)
    assert [(row["metric"], row["run"]) for row in table] == [
        ("reward", "a"),
        ("reward", "b"),
        ("gradient norm", "a"),
        ("gradient norm", "b"),
    ]
    assert table[0]["early"] == "1.0000 [0.5000, 2.0000]" and table[1]["late"] == "-"
    assert no_interval(rows, "one step") == ""
    assert no_interval([*rows, {"low": None}], "one step").startswith("; no interval for one step")
