"""The command that comes after a run: of a size that fits the model, and one that is understood."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sage_unsloth.__main__ import make_parser
from sage_unsloth.figures import table_text
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.models.device import has_gpu
from sage_unsloth.planning.presets import MODELS
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.columns import Columns
from sage_unsloth.prompts import PROJECT_PROMPT
from sage_unsloth.training import embedded_settings
from sage_unsloth.training.ledger import Ledger
from sage_unsloth.training.outcomes import (
    COURSE,
    advice,
    evaluation_command,
    finished_text,
    training_command,
    training_curve_rows,
    verifier_options,
)
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_config import SftConfig
from sage_unsloth.training.sft_recipe import out_of_format
from sage_unsloth.training.starting import StartingPoint, model_path

TINY = MODELS["arithmetic-base"]


def parsed(point, config, **more):
    text = evaluation_command(point, "grpo", Path("runs/a b"), config, **more)
    *module, first, second = shlex.split(text)[:4]
    assert [*module, first] == ["python", "-m", "sage_unsloth"]
    return make_parser().parse_args([second, *shlex.split(text)[4:]])


@pytest.mark.smoke
def test_the_tiny_models_evaluation_takes_minutes_and_not_hours():
    found = parsed(StartingPoint(TINY, "runs/sft/model"), embedded_settings.RLVR)
    assert found.models == ["start=runs/sft/model", "grpo=runs/a b"]
    problems = len(arithmetic.problems("test"))
    assert len(found.models) * problems * found.n == 12_800  # 51,200 by the paper's 256 samples
    assert (found.temperature, found.min_p, found.max_tokens) == (1, 0, 48)


def test_it_samples_as_the_run_did():
    config = replace(embedded_settings.RLVR, min_p=0.02, temperature=0.8, top_p=0.9)
    for smoke in (False, True):
        found = parsed(StartingPoint(TINY, "runs/sft/model"), config, smoke=smoke)
        assert (found.temperature, found.top_p, found.min_p) == (0.8, 0.9, 0.02)
    large = StartingPoint(MODELS["r1-distill-qwen-7b"], "org/model")
    found = parsed(large, RlvrConfig(min_p=0.05))
    assert (found.temperature, found.min_p) == (None, 0.05), "without a temperature: the paper's"


def test_it_grades_by_the_verifier_of_the_run():
    options = verifier_options(get_verifier("number:0.01"))
    found = parsed(
        StartingPoint(TINY, "runs/sft/model"),
        embedded_settings.RLVR,
        data="a.jsonl",
        verifier=options,
    )
    assert found.verifier == "number:0.01" and not found.allow_unconfined
    assert verifier_options(None) == []


def test_a_hub_set_of_a_known_name_is_evaluated_as_ones_own():
    columns = Columns(answer_pattern="#### (.+)")
    point = StartingPoint(TINY, "runs/sft/model")
    found = parsed(
        point, embedded_settings.RLVR, data="openai/gsm8k:main", columns=columns
    ).benchmarks
    assert found == ["own-gsm8k=openai/gsm8k:main"]


def test_training_reads_the_split_that_sft_read():
    text = training_command(
        Path("runs/sft"), SftConfig(), 2048, data="o/n", columns=Columns(split="cot")
    )
    assert text.partition("--data ")[2].startswith("o/n --split cot")


def test_after_sft_that_taught_nothing_comes_no_training():
    table = [{"in format": "0.900"}, {"in format": "0.000"}]
    assert "train SFT for more steps" in out_of_format(table)
    assert out_of_format(table[:1]) == out_of_format([]) == ""


def test_the_embedded_model_goes_by_its_name():
    point = StartingPoint(TINY, model_path(TINY), Path("runs/sft/adapter"))
    assert parsed(point, RlvrConfig()).models[0] == "start=arithmetic-base+runs/sft/adapter"


def test_a_large_model_takes_the_papers_samples_on_a_gpu_and_a_few_without():
    config = RlvrConfig(max_completion_length=6144)
    found = parsed(StartingPoint(MODELS["r1-distill-qwen-7b"], "org/model"), config)
    assert found.max_tokens == 6144 and found.benchmarks == ["aime", "amc23", "math500-l5"]
    assert (found.n, found.problems) == ((256, None) if has_gpu() else (4, 10))


def test_after_a_smoke_run_comes_another():
    found = parsed(StartingPoint(TINY, "runs/sft/model"), embedded_settings.RLVR, smoke=True)
    assert found.smoke and found.n == 256  # which --smoke shortens


def test_after_data_of_ones_own_come_problems_of_ones_own():
    point, config = StartingPoint(TINY, "runs/sft/model"), embedded_settings.RLVR
    columns = Columns(names={"problem": "ask", "answer": "total"}, answer_pattern="#### (.+)")
    found = parsed(point, config, data="my/mine.jsonl", columns=columns)
    assert found.benchmarks == ["held-out=HELD_OUT.jsonl"]  # not those that it was trained on
    assert found.columns == ["problem=ask", "answer=total"]
    assert found.answer_pattern == "#### (.+)"
    assert parsed(point, config, data="reasoning-gym:chain_sum").benchmarks == [
        "reasoning-gym:chain_sum"
    ]


def graded(step, **counts):
    grades = ("correct", "wrong", "unparsable", "timed_out")
    counts = dict.fromkeys(grades, 0) | counts
    return {"step": step} | {f"reward/{g.replace('_', ' ')}": n for g, n in counts.items()}


def test_answers_that_cannot_be_read_are_a_column_and_get_advice():
    """Of 20 steps the last two count: 3 + 7 of their 8 + 8 completions."""
    steps = [graded(i, unparsable=8) for i in range(1, 19)]
    steps += [graded(19, correct=3, wrong=2, unparsable=3), graded(20, timed_out=1, unparsable=7)]
    assert [row["no answer"] for row in training_curve_rows(steps)] == ["1.000", "0.625"]
    assert advice(steps, PROJECT_PROMPT).startswith(
        "62% of the last completions have no readable answer"
    )
    assert advice([*steps[:-1], graded(20, wrong=5, unparsable=3)], PROJECT_PROMPT) == ""


def test_where_no_answer_is_checked_there_is_no_such_column():
    for steps in ([{"step": 1, "reward": 0.0}], [graded(1)]):
        assert (
            "no answer" not in training_curve_rows(steps)[0] and advice(steps, PROJECT_PROMPT) == ""
        )


def test_every_column_of_a_course_is_in_one_line_of_80():
    """Of a long run, with completions of thousands of tokens and steps of minutes."""
    step = graded(1, correct=8) | dict.fromkeys(COURSE, 0.1234)
    step |= {"completions/mean_length": 1234.56, "seconds": 123.4}
    lines = table_text(training_curve_rows([step] * 1000), 80).splitlines()
    assert len(lines) == 3
    header = ["steps", "reward", "KL", "entropy", "guide", "tokens", "cut", "dead", "s"]
    assert lines[0].split() == [*header, "no", "answer"] and len(lines[0]) <= 80
    assert lines[1].split()[-4:] == ["0.123", "0.123", "123.4", "0.000"]
    assert "  1234.6  " in lines[1]


@pytest.mark.parametrize(
    ("stage", "full", "result"),
    [("sft", False, "model"), ("rlvr", False, "adapter"), ("rlvr", True, "model")],
)
def test_a_finished_run_is_known_by_its_result(tmp_path, stage, full, result):
    assert Ledger(tmp_path, stage).result() is None
    settings = {"stage": stage} | ({"full_finetuning": True} if full else {})
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    (tmp_path / "checkpoints").mkdir()
    assert Ledger(tmp_path, stage).result() is None
    (tmp_path / result).mkdir()
    assert Ledger(tmp_path, stage).result() == tmp_path / result
    assert Ledger(tmp_path, "rlvr" if stage == "sft" else "sft").result() is None
    assert str(tmp_path / result) in finished_text(tmp_path, tmp_path / result)


def test_the_pace_is_that_of_the_second_step(unsloth_module, tmp_path, caplog, monkeypatch):
    """The first one warms up too. The bar begins with what 80 columns should show."""
    from sage_unsloth.runs.stopping import Stop
    from sage_unsloth.training import step_log

    clock = iter([0.0, 50.0, 100.0, 104.0, 200.0, 203.0])
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: next(clock))
    state = SimpleNamespace(global_step=0, max_steps=12, is_world_process_zero=True, log_history=[])
    log = step_log.StepLog(tmp_path / "metrics.jsonl", "grpo", Stop(), lambda step, row: {})
    with caplog.at_level("INFO", "sage_unsloth"):
        log.on_train_begin(None, state, None)
        for step in (1, 2, 3):
            log.on_step_begin(None, state, None)
            state.global_step = step
            logs = {"loss": 0, "grad_norm": 1, "reward": 1, "kl/ref_k3": 0, "sage/entropy": 1}
            log.on_log(None, state, None, logs=logs | {"frac_reward_zero_std": 0.5})
    assert caplog.messages == ["grpo: the second step took 4.0 s. At this pace 10 more take 40 s."]
    assert log.bar.postfix.startswith("reward=1, kl=0, entropy=1, no gradient=0.5")
    log.bar.close()
