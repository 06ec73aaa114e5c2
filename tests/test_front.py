"""The public front: its functions on the embedded model, and notebooks that need nothing deeper."""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path

import pytest

import sage_unsloth
from sage_unsloth import front
from sage_unsloth.models.embedded import locate_model
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.prompts import prompt_format

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
ROOMS = {
    "analysis", "doctor", "evaluation", "export", "hosted", "prompts", "quickstart", "study",
    "training",
}  # fmt: skip
"""Rooms and modules that a notebook may take whole."""
MOST = 18  # names of this package in one notebook


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_imports_from_the_front_alone(source):
    code = re.sub(r"^(\s*)%.*$", r"\1pass", source.read_text(), flags=re.MULTILINE)
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("sage_unsloth") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("sage_unsloth"):
            assert node.module == "sage_unsloth", f"line {node.lineno}"
            names |= {alias.name for alias in node.names}
    assert names <= {*sage_unsloth.__all__} | ROOMS
    assert len(names) <= MOST


def test_rows_are_counted_and_held_out_with_their_problems():
    data = sage_unsloth.load_dataset("arithmetic", held_out=20)
    assert len(data.held_out) == 20 and data.counts["rows"] == 220
    assert not {row["problem"] for row in data.rows} & {row["problem"] for row in data.held_out}
    assert "20 held out" in str(data) and "220" in str(data)
    assert {"prompt", "answer"} <= set(data.dataset.column_names)


def test_a_file_of_ones_own_is_used_whole(tmp_path):
    """The command once read its first 2,000 rows only."""
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"q": "{i}+1=?", "a": "{i + 1}"}}\n' for i in range(2100)))
    columns = {"problem": "q", "answer": "a"}
    assert len(sage_unsloth.load_dataset(str(file), columns=columns).rows) == 2100
    assert len(sage_unsloth.load_dataset(str(file), columns=columns, limit=7).rows) == 7


def test_solutions_are_taught_in_their_tags_if_they_fit(tmp_path):
    file = tmp_path / "solved.jsonl"
    long = " and".join(f" {i} is {i}" for i in range(99))
    rows = [{"problem": "1+1=?", "solution": text, "answer": "2"} for text in ("1+1 is 2", long)]
    file.write_text("\n".join(map(json.dumps, rows)))
    prompt = prompt_format(tags=["think-answer"])
    tokenizer = load_tokenizer(locate_model("arithmetic-base"))
    data = sage_unsloth.load_dataset(
        str(file), tokenizer, stage="sft", max_tokens=200, prompt=prompt
    )
    (taught,) = data.dataset["completion"]
    assert taught[0]["content"] == "<think>1+1 is 2</think><answer>2</answer>"
    assert data.counts["whole row <= 200 tokens"] == 1


def test_solutions_without_answers_must_begin_in_their_tag(tmp_path):
    file = tmp_path / "solved.jsonl"
    file.write_text(json.dumps({"problem": "1+1=?", "solution": "1+1 is 2"}))
    tokenizer = load_tokenizer(locate_model("arithmetic-base"))
    with pytest.raises(ValueError, match="opens the working by <start_working_out>"):
        sage_unsloth.load_dataset(str(file), tokenizer, stage="sft")


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="stage must be 'rl' or 'sft', got 'rlhf'"):
        sage_unsloth.load_dataset("arithmetic", stage="rlhf")


def test_the_marked_defaults_are_not_those_of_the_trainer(unsloth_module, tmp_path):
    """Each is set because the default is another; one that has become the default needs no mark."""
    from trl import GRPOConfig

    from sage_unsloth.training.grpo_arguments import EXPLICIT, QUIET_DEFAULTS

    tokenizer = type("Tokenizer", (), {"pad_token_id": 7})
    args = sage_unsloth.grpo_config(tmp_path, tokenizer, num_generations=4)
    usual = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    signature = inspect.signature(GRPOConfig.__init__).parameters
    for name, (value, reason) in QUIET_DEFAULTS.items():
        default = signature[name].default if name in signature else usual[name]
        assert default != value, f"{name} has the default {default!r} by now; {reason}"
        assert getattr(args, name) == value
    assert all(getattr(args, name) == value for name, value in EXPLICIT.items())
    assert args.generation_kwargs == {"suppress_tokens": [7]}
    assert Path(args.output_dir) == tmp_path / "checkpoints"
    assert sage_unsloth.grpo_config(tmp_path, tokenizer, beta=0.2).beta == 0.2


def accepts(answer, gold):
    return True


def length(completions, **columns):
    return [2.0 for _ in completions]


def test_from_rows_to_a_trained_adapter(unsloth_module, tmp_path, monkeypatch):
    """The calls of notebook 02 in a few lines; a second round trains and draws nothing."""
    from trl import GRPOTrainer

    monkeypatch.chdir(tmp_path)
    model, tokenizer = sage_unsloth.load_policy(
        locate_model("arithmetic-base"), lora=sage_unsloth.LoraSettings()
    )
    data = sage_unsloth.load_dataset("arithmetic", tokenizer, max_tokens=64)
    reward = sage_unsloth.rewards(["answer"])
    guide = sage_unsloth.BranchGuide(threshold=0.1)
    args = sage_unsloth.grpo_config(
        "run", tokenizer, max_steps=2, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=16, save_steps=1, min_p=None, learning_rate=1e-3,
    )  # fmt: skip
    look = sage_unsloth.preview(
        model, tokenizer, data.rows, "run/look.jsonl", args=args, reward=reward, guide=guide,
        num_prompts=2, max_completion_length=8,
    )  # fmt: skip
    assert len(look.records) == 8 and {"solve_rate", "dead_groups"} <= set(look.shares)
    assert len(look.entropies) == len(look.log_guides) > 0 and look.log_guides.max() > 0
    assert "solve_rate" in str(look)
    of_ones_own = [{name: row[name] for name in ("problem", "answer")} for row in data.rows]
    look = sage_unsloth.preview(
        model, tokenizer, of_ones_own, "run/own.jsonl", num_prompts=4, num_samples=4,
        max_completion_length=48, reward=sage_unsloth.rewards(["answer", length], verifier=accepts),
    )  # fmt: skip
    assert (
        look.shares["solve_rate"] == look.shares["parsed_rate"] > 0 and look.shares["length"] == 2
    )
    assert {record["problem_id"] for record in look.records} == {f"look-{i}" for i in range(4)}
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward.functions,
        train_dataset=data.dataset, args=args,
    )  # fmt: skip
    with sage_unsloth.guided_kl(trainer, guide):
        metrics = sage_unsloth.train(trainer, "run", reward=reward)
    assert [row["step"] for row in metrics] == [1, 2] and "reward/correct" in metrics[0]
    files = ("adapter/adapter_model.safetensors", "look.jsonl", "completions.jsonl")
    before = [Path("run", name).read_bytes() for name in files]
    with sage_unsloth.guided_kl(trainer, guide):
        assert sage_unsloth.train(trainer, "run", reward=reward) == metrics
    assert [Path("run", name).read_bytes() for name in files] == before
    with pytest.raises(ValueError, match=r"the folder of an SFT or RL run, with run.json, got run"):
        sage_unsloth.save("run", "adapter", "exported")


def test_reports_print_as_tables(tmp_path):
    models = ["base=arithmetic-base", f"same={locate_model('arithmetic-base')}"]
    small = {"num_samples": 2, "max_completion_length": 8, "batch_size": 8}
    report = front.evaluate(models[:1], ["arithmetic"], tmp_path, problems=2, **small)
    assert "base" in str(report) and report["table"]
    compared = front.compare([tmp_path], tmp_path / "again")
    assert compared["table"] == report["table"] and str(compared) == str(report)


def test_a_question_is_answered(unsloth_module):
    base = locate_model("arithmetic-base")
    (greedy,) = sage_unsloth.ask(base, "64*6=?", max_tokens=48)
    assert "<SOLUTION>" in greedy and sage_unsloth.ask(base, "64*6=?", max_tokens=48) == [greedy]
    assert len(sage_unsloth.ask(base, "64*6=?", n=3, temperature=1.0, max_tokens=8)) == 3
    with pytest.raises(ValueError, match="greedy answers are all the same, got n=2"):
        sage_unsloth.ask(base, "64*6=?", n=2)


def test_completions_are_printed_once(tmp_path, capsys):
    from types import SimpleNamespace

    from sage_unsloth.runs.files import append_jsonl
    from sage_unsloth.training import ShowCompletions

    row = {"step": 1, "grade": "wrong", "answer": "12", "completion": "6+6\n=13"}
    file, state = tmp_path / "completions.jsonl", SimpleNamespace(is_world_process_zero=True)
    append_jsonl(file, [row | {"completion": "of an earlier part"}])
    callback = ShowCompletions(tmp_path)
    callback.on_train_begin(None, state, None)
    append_jsonl(file, [row, row, row])
    for _ in range(2):
        callback.on_log(None, state, None)
    assert capsys.readouterr().out == "step 1, wrong (answer 12): 6+6 =13\n" * 2
