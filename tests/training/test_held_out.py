"""The held-out curve: what it measures, what it keeps, and that training does not notice it."""

import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.named_models import parse_model
from sage_unsloth.models.loading import LoraSettings
from sage_unsloth.models.trained import read_run
from sage_unsloth.objective.guides import RandomGuide
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.runs.checkpoints import last_checkpoint
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.sampling.engines import TransformersEngine
from sage_unsloth.sampling.record_files import FORMAT, settings_path
from sage_unsloth.training.held_out import _forget_other_policy, held_out_sampling
from sage_unsloth.training.held_out_metrics import change_text, held_out_metrics
from sage_unsloth.training.held_out_rows import check_evaluations, split_rows
from sage_unsloth.training.held_out_schedule import best_row, reason_to_end
from sage_unsloth.training.policy_engine import preserve_random_state
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.rows import best_evaluation, held_out_curve
from sage_unsloth.training.stage import METRICS, read_metrics

TRAIN = arithmetic.problems("train")
HELD_OUT = arithmetic.problems("test")[:4]
SMOKE = smoke_config()
PLAIN = replace(
    SMOKE.rlvr,
    max_steps=5,
    save_steps=2,
    learning_rate=5e-3,
    max_resamples=1,
    lora=LoraSettings(dropout=0.1),
)
EVALUATED = replace(PLAIN, eval_steps=2, eval_samples=3)


def guide():
    return RandomGuide(CosineSchedule(0.5, 0.5))


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def equal(one, other):
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def merged(smoke_sft):
    return smoke_sft


@pytest.fixture(scope="module")
def plain(merged, tmp_path_factory):
    return rlvr(PLAIN, merged, TRAIN, tmp_path_factory.mktemp("plain"), guide())


@pytest.fixture(scope="module")
def evaluated(merged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    return rlvr(EVALUATED, merged, TRAIN, folder, guide(), held_out=HELD_OUT)


def test_training_does_not_notice_it(plain, evaluated):
    """Dropout, the guide's noise, groups sampled again, rollouts: all random, all the same."""
    assert equal(plain, evaluated)
    without, rows = (read_metrics(adapter.parent) for adapter in (plain, evaluated))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    changing = ("seconds", "step_time")
    for one, other in zip(without, rows, strict=True):
        trained = {k: v for k, v in other.items() if not k.startswith("eval/")}
        assert {k: v for k, v in one.items() if k not in changing} == {
            k: v for k, v in trained.items() if k not in changing
        }


def test_the_curve_is_what_the_completions_say(evaluated):
    folder = evaluated.parent
    rows = read_metrics(folder, first=0)
    curve = held_out_curve(rows)
    assert [row["step"] for row in curve] == [0, 2, 4, 5], "before, every second step, after"
    assert [row["step"] for row in read_jsonl(folder / METRICS)] == [0, 1, 2, 3, 4, 5]
    for row in curve:
        records = read_jsonl(folder / "held-out" / f"step-{row['step']:06d}.jsonl")
        assert len(records) == 4 * 3
        right = {}
        for record in records:
            right.setdefault(record["problem_id"], []).append(record["grade"] == "correct")
        assert right.keys() == {problem["id"] for problem in HELD_OUT}
        assert row["eval/pass@1"] == pytest.approx(np.mean([np.mean(r) for r in right.values()]))
        assert row["eval/pass@3"] == pytest.approx(np.mean([any(r) for r in right.values()]))
        assert row["eval/tokens"] == pytest.approx(np.mean([r["num_tokens"] for r in records]))
        assert row["eval/seconds"] > 0
    problems = json.loads((folder / "held-out" / "problems.json").read_text())
    assert problems == HELD_OUT
    drawn = [
        [r["completion"] for r in read_jsonl(folder / "held-out" / f"step-00000{step}.jsonl")]
        for step in (0, 5)
    ]
    assert drawn[0] != drawn[1], "the policy that is evaluated is the one that is trained"


def test_the_best_adapter_is_kept_and_can_be_evaluated(evaluated):
    folder = evaluated.parent
    best = best_evaluation(held_out_curve(read_metrics(folder, first=0)), "eval/pass@1")
    note = json.loads((folder / "best" / "evaluation.json").read_text())
    assert (note["step"], note["eval/pass@1"]) == (best["step"], best["eval/pass@1"])
    assert equal(folder / "best", evaluated) == (best["step"] == 5)
    spec = parse_model(f"best={folder / 'best'}")
    assert spec.adapter == str(folder / "best")
    assert spec.path == json.loads((folder / "run.json").read_text())["model_path"]


def test_the_best_adapter_can_be_exported(evaluated, plain, tmp_path):
    folder = evaluated.parent
    assert read_run(folder).adapter == evaluated
    assert read_run(folder, which="best").adapter == folder / "best"
    out = tmp_path / "export"
    export = ["export", str(folder), "--to", "adapter", "--which", "best", "--out", str(out)]
    if json.loads((folder / "best" / "evaluation.json").read_text())["step"]:
        assert main(export) == 0
        assert equal(out, folder / "best")
    with pytest.raises(ValueError, match=r"has none\. Train with --eval-steps 50"):
        read_run(plain.parent, which="best")


class Killed(BaseException):
    """What no code of the run can catch, as SIGKILL."""


@pytest.mark.long
@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
@pytest.mark.parametrize("evaluation", [0, 4, 5])
def test_killed_in_an_evaluation(merged, evaluated, tmp_path, monkeypatch, how, evaluation):
    """Resumed, it ends as the run that was left alone; a signal loses no step."""
    stream = TransformersEngine.stream
    config = replace(EVALUATED, save_steps=3)

    def dies(self, *arguments):
        drawn = stream(self, *arguments)
        if (tmp_path / "held-out" / f"step-{evaluation:06d}.settings.json").exists():
            yield next(drawn)
            raise how
        yield from drawn

    monkeypatch.setattr(TransformersEngine, "stream", dies)
    with pytest.raises(how):
        rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT)
    monkeypatch.undo()
    saved = last_checkpoint(tmp_path / "checkpoints")
    expected = None if evaluation == 0 else evaluation if how is KeyboardInterrupt else 3
    assert saved is None if expected is None else saved.name == f"checkpoint-{expected}"
    adapter = rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT)
    assert equal(adapter, evaluated)
    assert equal(tmp_path / "best", evaluated.parent / "best")

    def timeless(folder):
        changing = ("seconds", "step_time", "eval/seconds")
        rows = read_metrics(folder, first=0)
        return [{k: v for k, v in row.items() if k not in changing} for row in rows]

    assert timeless(tmp_path) == timeless(evaluated.parent)


@pytest.mark.long
def test_a_best_adapter_of_steps_that_are_trained_again_is_taken_back(
    merged, tmp_path, monkeypatch
):
    """Best at step 2, saved in the checkpoint of step 3; better at step 4, and killed in step 5."""
    from sage_unsloth.training import held_out

    config, real = replace(EVALUATED, save_steps=3), held_out.held_out_metrics
    scores = iter([0.1, 0.5, 0.9])

    def dictated(records, *others):
        return real(records, *others) | {"eval/pass@1": next(scores)}

    monkeypatch.setattr(held_out, "held_out_metrics", dictated)
    with pytest.raises(StopIteration):  # at the evaluation of step 5
        rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT)
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text())["step"] == 4
    scores = iter([0.4, 0.2])  # as where the GPU rounds in another order
    rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT)
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text())["step"] == 2
    assert [row["eval/pass@1"] for row in held_out_curve(read_metrics(tmp_path, 0))] == [
        0.1, 0.5, 0.4, 0.2,
    ]  # fmt: skip


@pytest.mark.long
def test_the_best_adapter_of_an_evaluation_after_a_resume_is_kept(merged, tmp_path, monkeypatch):
    """Interrupted in the evaluation of step 2, best at step 2, better at 4, killed in step 5."""
    from sage_unsloth.training import held_out

    config, real = replace(EVALUATED, save_steps=100), held_out.held_out_metrics

    def run(*scores):
        left = iter(scores)

        def dictated(records, *others):
            score = next(left)
            if score is None:
                raise KeyboardInterrupt
            return real(records, *others) | {"eval/pass@1": score}

        monkeypatch.setattr(held_out, "held_out_metrics", dictated)
        rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT)

    with pytest.raises(KeyboardInterrupt):
        run(0.1, None)
    with pytest.raises(StopIteration):
        run(0.8, 0.9)
    run(0.3, 0.2)
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text())["step"] == 2


@pytest.mark.long
def test_patience_ends_the_run_also_where_it_was_killed_behind_it(merged, tmp_path, monkeypatch):
    """A policy that does not learn is not better: the run ends after two evaluations."""
    from peft import PeftModel

    config = replace(
        PLAIN, learning_rate=1e-12, eval_steps=1, eval_samples=1, patience=2, best_by="pass@k"
    )
    save = PeftModel.save_pretrained

    def dies(self, folder, *args, **kwargs):
        if "adapter.partial" in str(folder):
            raise Killed
        return save(self, folder, *args, **kwargs)

    monkeypatch.setattr(PeftModel, "save_pretrained", dies)
    with pytest.raises(Killed):
        rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT)
    monkeypatch.undo()
    adapter = rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2], "not a step more"
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text())["step"] == 0
    assert rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=HELD_OUT) == adapter


@pytest.mark.long
def test_a_spent_coverage_budget_ends_the_run_and_best_keeps_within_it(merged, tmp_path):
    """Steps that are far too long take every right answer away: two evaluations see that."""
    config = replace(
        PLAIN, max_steps=6, learning_rate=5.0, warmup_ratio=0.0, max_grad_norm=100.0,
        eval_steps=1, eval_samples=8, coverage_budget=0.1,
    )  # fmt: skip
    rlvr(config, merged, TRAIN, tmp_path, guide(), held_out=arithmetic.problems("test")[:24])
    curve = held_out_curve(read_metrics(tmp_path, first=0))
    changes = [row.get("eval/change@8", 0.0) for row in curve]
    assert len(curve) < 7 and max(changes[-2:]) < -0.1 <= min(changes[:-2]), changes
    assert "coverage_budget" in reason_to_end(config, curve)
    kept = json.loads((tmp_path / "best" / "evaluation.json").read_text())
    assert kept["step"] <= curve[-3]["step"]


def test_the_budget_asks_for_two_evaluations_and_rules_the_best():
    config = replace(EVALUATED, eval_samples=4, coverage_budget=0.05)
    curve = [
        {"step": step, "eval/pass@1": first, "eval/change@4": change, "eval/change@4_high": -0.001}
        for step, first, change in ((2, 0.5, -0.05), (4, 0.9, -0.06), (6, 0.6, -0.01))
    ]
    curve.insert(0, {"step": 0, "eval/pass@1": 0.4})
    assert not reason_to_end(config, curve), "one of the last two is within it"
    assert best_row(config, curve)["step"] == 6, "the higher one of step 4 lost too much"
    curve[3]["eval/change@4"] = -0.2
    assert "pass@4 on held-out rows lost more than 0.05" in reason_to_end(config, curve)
    curve[3]["eval/change@4_high"] = 0.01
    assert not reason_to_end(config, curve), "the loss may be chance"
    assert best_row(config, curve)["step"] == 2
    assert best_row(replace(config, coverage_budget=0.0), curve)["step"] == 4


def evaluation(*right, samples=4):
    """Records of problems p0, p1 … with so many right samples."""
    return [
        {
            "problem_id": f"p{problem}",
            "sample": sample,
            "grade": "correct" if sample < count else "wrong",
            "extracted": "1",
            "finish_reason": "stop",
            "num_tokens": 5,
        }
        for problem, count in enumerate(right)
        for sample in range(samples)
    ]


def test_an_evaluation_says_at_which_k_and_in_which_family_pass_at_k_fell():
    rows = [{"id": f"p{i}", "family": "ab"[i // 20], "guess": 0.5} for i in range(40)]
    before = evaluation(*[2] * 40)
    now = held_out_metrics(evaluation(*[4] * 20, *[0] * 20), rows, before)
    assert now["eval/pass@1"] == now["eval/pass@4"] == 0.5
    assert (now["eval/pass@4/a"], now["eval/pass@4/b"]) == (1, 0)
    assert now["eval/change@4"] == -0.5 and now["eval/change@4_high"] < 0
    assert now["eval/pass@1_low"] < 0.5 < now["eval/pass@1_high"]
    assert now["eval/guess@2"] == 0.75
    assert change_text(now, 4).startswith("pass@4 fell: -0.500 [-0.6")
    same = held_out_metrics(before, rows, before)
    assert same["eval/change@4_low"] < 0 < same["eval/change@4_high"]
    assert "may not have changed" in change_text(same, 4)
    first = held_out_metrics(before, [{"id": row["id"]} for row in rows])
    assert not [name for name in first if "change" in name or "guess" in name or "/a" in name]
    assert change_text(first, 4) == ""


def test_rows_are_held_out_with_every_row_of_their_problem():
    rows = [{"problem": f"p{i % 10}", "answer": "1", "id": str(i)} for i in range(20)]
    config = RlvrConfig(eval_steps=1, eval_rows=3)
    training, kept = split_rows(config, rows)
    assert len(kept) == 3 and len(training) == 14
    assert not {r["problem"] for r in kept} & {r["problem"] for r in training}
    assert len(split_rows(replace(config, eval_rows=64), rows)[1]) == 5, "a quarter at most"
    given = [{"problem": "p1", "answer": "2"}]
    training, kept = split_rows(RlvrConfig(eval_steps=1), rows, given)
    assert len(training) == 18 and kept == [{"id": "held-out-0", "problem": "p1", "answer": "2"}]
    assert split_rows(RlvrConfig(), rows) == (rows, [])
    _, (of_csv,) = split_rows(RlvrConfig(eval_steps=1), rows, [given[0] | {"guess": "0.1"}])
    assert of_csv["guess"] == 0.1


@pytest.mark.parametrize(
    ("config", "rows", "held_out", "message"),
    [
        (RlvrConfig(), TRAIN, HELD_OUT, "eval_steps above 0, got 4 rows"),
        (RlvrConfig(eval_steps=1), TRAIN[:3], None, "at least 4 of them, got 3"),
        (RlvrConfig(eval_steps=1), HELD_OUT, HELD_OUT, "rows to train on, but all 4 rows share"),
        (RlvrConfig(eval_steps=1), TRAIN, [], "held-out rows must not be empty"),
        (RlvrConfig(eval_steps=1), TRAIN, [HELD_OUT[0]] * 2, "is there 2 times"),
        (RlvrConfig(eval_steps=1), TRAIN, [{"problem": "1+1"}], "answer"),
        (RlvrConfig(eval_steps=1, eval_rows=2), TRAIN, HELD_OUT, "got eval_rows=2 with 4 rows"),
    ],
)
def test_held_out_rows_that_cannot_be_used(config, rows, held_out, message):
    given = None if held_out is None else len(held_out)
    with pytest.raises(ValueError, match=message):
        check_evaluations(config, given, graded=True)
        split_rows(config, rows, held_out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 2}, "patience=2 has no effect with eval_steps=0. Set eval_steps=50"),
        ({"coverage_budget": 0.1}, "coverage_budget=0.1 has no effect with eval_steps=0"),
        ({"best_by": "pass@8"}, "best_by must be one of pass@1, pass@k"),
        ({"eval_steps": -1}, "eval_steps must be >= 0"),
        ({"eval_samples": 0}, "eval_samples must be > 0"),
        ({"eval_samples": 8}, r"eval_samples=8 has no effect with eval_steps=0. Set eval_steps=50"),
        ({"eval_rows": 8}, "eval_rows=8 has no effect with eval_steps=0"),
        ({"best_by": "pass@k"}, "best_by='pass@k' has no effect with eval_steps=0"),
        (
            {"rehearsal": "js,samples=16"},
            "rehearsal='js,samples=16' has no effect with rehearsal_c",
        ),
        ({"vllm_server": "http://gpu:8000"}, r"has no effect with rollouts='auto'. Set rollouts=s"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        RlvrConfig(**settings)


def test_the_first_of_equal_evaluations_is_the_best():
    values = [0.2, 0.5, 0.5, 0.4]
    curve = [{"step": 10 * i, "eval/pass@1": value} for i, value in enumerate(values)]
    assert best_evaluation(curve, "eval/pass@1")["step"] == 10
    two, three = (replace(EVALUATED, patience=patience) for patience in (2, 3))
    assert "last 2 evaluations" in reason_to_end(two, curve) and not reason_to_end(three, curve)
    assert not reason_to_end(two, curve[:3])
    assert best_evaluation([], "eval/pass@1") is None
    rows = [{"step": 30, "eval/pass@1": 1}, {"step": 7}, {"step": 0, "eval/pass@1": 0}]
    assert [row["step"] for row in held_out_curve(rows)] == [0, 30]
    assert [row["step"] for row in held_out_curve(rows, 29)] == [0]


def test_completions_outside_a_step_are_drawn_as_a_steps_are():
    names = ("temperature", "top_p", "min_p", "max_completion_length", "grade_seconds", "seed")
    values = dict(zip(names, (0.7, 0.9, 0.2, 33, 7.0, 5), strict=True))
    config = RlvrConfig(**values, eval_steps=2, eval_samples=6)
    sampling = held_out_sampling(config, vllm=False)
    assert {name: getattr(sampling, name) for name in names} == values
    assert sampling.num_samples == 6


def test_completions_of_other_weights_are_forgotten(tmp_path):
    path = tmp_path / "step-000002.jsonl"
    for policy, stays in (("same", True), ("other", False)):
        path.write_text("{}\n")
        settings_path(path).write_text(
            json.dumps({"format": FORMAT, "settings": {"policy": "same"}})
        )
        _forget_other_policy(path, policy)
        assert path.exists() == settings_path(path).exists() == stays


def test_what_an_evaluation_switches_is_put_back(make_trainer):
    trainer = make_trainer()
    model, tokenizer = trainer.model, trainer.processing_class
    model.train()
    layer = next(m for m in model.modules() if hasattr(m, "gradient_checkpointing"))
    layer.gradient_checkpointing = "unsloth"
    model.config.use_cache = False
    tokenizer.padding_side = "right"

    def state():
        return (
            random.random(),
            np.random.random(),
            torch.rand(1).item(),
            [m.training for m in model.modules()],
            ["_flag_for_generation" in vars(m) for m in model.modules()],
            layer.gradient_checkpointing,
            model.config.use_cache,
            tokenizer.padding_side,
            {k: v for k, v in os.environ.items() if k.startswith("UNSLOTH_")},
        )

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] = "1"
    try:
        before = state()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        with preserve_random_state(model, tokenizer):
            assert os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] == "0"
            state()  # draws from every generator
            model.eval()
            for module in model.modules():
                module._flag_for_generation = True
            layer.gradient_checkpointing, model.config.use_cache = False, True
            tokenizer.padding_side = "left"
            os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] = "2"
            os.environ["UNSLOTH_OF_THE_TEST"] = "1"
        assert state() == before
    finally:
        del os.environ["UNSLOTH_RETURN_HIDDEN_STATES"]
