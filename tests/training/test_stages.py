"""Both stages as the command line starts them, one after the other, on local files in the hub's
columns.
"""

import json
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sage_unsloth.__main__ import main
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.models.weights import model_identity
from sage_unsloth.planning.fitting import plan_setup
from sage_unsloth.planning.presets import CARDS, MODELS
from sage_unsloth.problems.corpora import sft_corpus
from sage_unsloth.problems.held_out import hold_out
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training import embedded_settings
from sage_unsloth.training.algorithms import get_algorithm
from sage_unsloth.training.outcomes import training_curve_rows
from sage_unsloth.training.recipes import run_rlvr
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.stage import read_metrics
from sage_unsloth.training.starting import (
    StartingPoint,
    rlvr_config,
    run_setup,
    sft_config,
    starting_point,
    trained_preset,
)

SMOKE = data_folder() / "smoke"
SEVEN_B = MODELS["qwen2.5-math-7b"]


@pytest.fixture(scope="module")
def sft_run(tmp_path_factory, unsloth_module):
    out = tmp_path_factory.mktemp("runs") / "sft"
    command = [
        "sft",
        "--model",
        "arithmetic-base",
        "--path",
        str(SMOKE / "openmathreasoning-mini.jsonl"),
        "--held-out",
        "4",
        "--smoke",
        "--out",
        str(out),
    ]
    assert main(command) == 0
    return out


def train(sft_run, out, *more):
    return main(
        [
            "train",
            "--algorithm",
            "sage-branch",
            "--from",
            str(sft_run),
            "--out",
            str(out),
            "--smoke",
            "--path",
            str(SMOKE / "dapo-math-17k.jsonl"),
            *more,
        ]
    )


ONCE = (
    "check_request", "check_tracker", "check_processes", "check_judges", "check_evaluations",
    "check_row_golds", "check_rehearsal", "check_fits", "check_room", "check_rows",
    "compare", "begin", "run_rlvr_job", "resolve_rlvr",
)  # fmt: skip
"""Functions of this package that a run calls at most once."""


@contextmanager
def counted():
    """How often a process reads each run.json, loads a tokenizer, and calls each of `ONCE`."""
    calls = Counter()

    def note(frame, event, _):
        name = frame.f_code.co_name
        if event == "call" and name in (*ONCE, "read_json", "from_pretrained"):
            if name == "from_pretrained" and "tokenization_auto" in frame.f_code.co_filename:
                calls["tokenizer"] += 1
            elif name == "read_json" and Path(frame.f_locals["path"]).name == "run.json":
                calls[Path(frame.f_locals["path"]).absolute()] += 1
            elif name in ONCE and "sage_unsloth" in frame.f_code.co_filename:
                calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def rl_calls(sft_run):
    """Of a run that `rl_run` takes."""
    with counted() as calls:
        assert train(sft_run, sft_run.parent / "sage-branch") == 0
    return calls


@pytest.fixture(scope="module")
def rl_run(sft_run, rl_calls):
    return sft_run.parent / "sage-branch"


def test_sft_compares_before_and_after(sft_run, rl_run):
    table = json.loads((sft_run / "before_after.json").read_text())
    assert [row["model"] for row in table] == ["before SFT", "after SFT"]
    assert all(0 <= float(row["in format"]) <= 1 for row in table)
    before = read_jsonl(sft_run / "held-out" / "before.jsonl")
    assert len(before) == 4 * 4
    run = json.loads((sft_run / "run.json").read_text())
    assert run["settings"]["max_steps"] == 2
    drawn = json.loads((sft_run / "held-out" / "before.settings.json").read_text())["settings"]
    rl = json.loads((rl_run / "run.json").read_text())["settings"]
    for name in ("temperature", "top_p", "min_p"):
        assert drawn["sampling"][name] == rl[name], name


def test_held_out_problems_are_not_trained_on(sft_run, unsloth_module, monkeypatch, tmp_path):
    from sage_unsloth.training import sft_recipe as stages

    seen = {}

    def stop(job):
        seen["rows"] = job.rows
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "run_sft_job", stop)
    with pytest.raises(KeyboardInterrupt):
        stages.run_sft(tmp_path, model="arithmetic-base", held_out=8)
    corpus = sft_corpus(load_tokenizer(data_folder() / "arithmetic-base"), 160, data="arithmetic")
    _, kept = hold_out(corpus.rows, 8)
    trained_on = {row["problem"] for row in seen["rows"]}
    assert trained_on and not trained_on & {row["problem"] for row in kept}


def test_rl_trains_from_the_sft_run(sft_run, rl_run, capsys):
    run = json.loads((rl_run / "run.json").read_text())
    assert run["model_path"] == str(sft_run / "model")
    assert "BranchGuide" in run["settings"]["guide"]
    assert [row["step"] for row in read_metrics(rl_run)] == [1, 2]
    for name in (
        "adapter/adapter_model.safetensors",
        "training.png",
        "completions.jsonl",
        "preflight.json",
    ):
        assert (rl_run / name).exists(), name


def test_a_run_reads_loads_and_checks_once(sft_run, rl_calls):
    assert rl_calls["tokenizer"] == 1
    assert rl_calls[sft_run / "run.json"] <= 1  # 0 where this process has read it before
    for name in ("check_request", "check_judges", "Ledger.compare", "Ledger.begin", "resolve_rlvr"):
        assert rl_calls[name] == 1, name
    assert not {name: count for name, count in rl_calls.items() if count > 1}


def test_a_full_disk_is_refused_before_the_first_step(sft_run, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert train(sft_run, tmp_path / "rl") == 2
    assert "GB are free. Free some space" in capsys.readouterr().err
    command = ["sft", "--model", "arithmetic-base", "--smoke", "--out", str(tmp_path / "sft")]
    assert main(command) == 2
    assert "GB are free. Free some space" in capsys.readouterr().err


def test_a_second_run_only_reports(sft_run, rl_run, capsys, monkeypatch):
    from sage_unsloth.training import rlvr_stage as module

    monkeypatch.setattr(module, "load_policy", lambda *a, **k: pytest.fail("nothing to load"))
    assert train(sft_run, rl_run) == 0
    out = capsys.readouterr().out
    assert "first 1" in out and "groups" in out and "Next: " in out


def test_changed_settings_are_refused_by_name(sft_run, rl_run, capsys):
    assert train(sft_run, rl_run, "--set", "beta=0.5") == 2
    assert "beta was 0.05 and is 0.5" in capsys.readouterr().err
    assert train(sft_run, sft_run) == 2
    assert f'in {sft_run}: stage was "sft" and is "rlvr". Choose' in capsys.readouterr().err


def test_a_run_is_not_made_longer(sft_run, rl_run, capsys):
    assert train(sft_run, rl_run, "--max-steps", "9") == 2
    error = capsys.readouterr().err
    assert f"{rl_run} has 2, got 9. Train its result" in error
    assert f"by --from {rl_run} with another --out" in error
    assert "number of steps of a run is fixed" in error
    assert (
        main(["sft", "--model", "arithmetic-base", "--max-steps", "9", "--out", str(sft_run)]) == 2
    )
    assert f"by --model {sft_run / 'model'} with" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_trained_no_step_takes_new_settings(sft_run, tmp_path, monkeypatch, capsys):
    """As after running out of memory in the first step: the remedy is another setting."""
    from sage_unsloth.training import rlvr_stage as module

    def out_of_memory(*args, **kwargs):
        raise ValueError("no memory left")

    monkeypatch.setattr(module, "run_trainer", out_of_memory)
    assert train(sft_run, tmp_path / "run") == 2
    monkeypatch.undo()
    assert train(sft_run, tmp_path / "run", "--set", "micro_batch_size=4") == 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["settings"]["micro_batch_size"] == 4
    assert run["settings"]["rollouts"] == "transformers", "what ran, not what was asked for"


@pytest.mark.long
def test_a_run_with_a_teacher_is_reported_again_and_repeated(sft_run, tmp_path, capsys):
    """run.json names the teacher by its weights, the command by its folder."""
    out, base = tmp_path / "run", str(data_folder() / "arithmetic-base")
    words = ("--algorithm", "sage-teacher", "--teacher", base)
    assert train(sft_run, out, *words) == 0
    assert train(sft_run, out, *words) == 0
    other = ("--algorithm", "sage-teacher", "--teacher", str(sft_run / "model"))
    assert train(sft_run, out, *other) == 2
    assert "teacher was" in capsys.readouterr().err
    repeated = ["train", "--config", str(out / "run.json"), "--out", str(tmp_path / "again")]
    assert main(repeated) == 0
    runs = [json.loads((tmp_path / n / "run.json").read_text()) for n in ("run", "again")]
    assert runs[0]["settings"] == runs[1]["settings"]


@pytest.mark.long
def test_a_second_sft_has_data_and_length_of_the_first_model(sft_run, tmp_path):
    assert main(["sft", "--model", str(sft_run / "model"), "--smoke", "--out", str(tmp_path)]) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["model_path"] == str(sft_run / "model")
    assert run["settings"]["max_length"] == embedded_settings.SFT.max_length


def test_what_no_result_depends_on_may_change(sft_run, rl_run):
    assert train(sft_run, rl_run, "--set", "save_steps=2", "sample_steps=3") == 0


@pytest.mark.long
def test_the_base_model_can_be_the_reference(sft_run, tmp_path):
    assert train(sft_run, tmp_path / "run", "--set", "reference=base") == 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["model_path"] == str(data_folder() / "arithmetic-base")
    expected = model_identity(run["model_path"], sft_run / "adapter")["adapter"]
    assert run["settings"]["adapter"] == expected


def test_starting_points(sft_run, rl_run, tmp_path):
    point = starting_point(sft_run, "sft")
    assert (point.preset.name, point.adapter) == ("arithmetic-base", None)
    assert starting_point("qwen2.5-math-7b", "sft").model == "Qwen/Qwen2.5-Math-7B"
    with pytest.raises(ValueError, match="needs a start with an adapter"):
        starting_point("qwen2.5-math-7b", "base")
    # A run that was made on another machine: the embedded model lay elsewhere, or its own did.
    shutil.copytree(sft_run, tmp_path / "moved")
    run = json.loads((sft_run / "run.json").read_text())
    for below, name in (("arithmetic-base", "arithmetic-base"), ("mine", "model")):
        run["model_path"] = f"/content/elsewhere/{below}"
        (tmp_path / "moved" / "run.json").write_text(json.dumps(run))
        point = starting_point(tmp_path / "moved", "sft")
        assert (point.preset.name, point.model) == (name, str(tmp_path / "moved" / "model"))
        assert trained_preset(point.model).name == name
    for run, result in ((sft_run, "model"), (rl_run, "adapter")):
        (tmp_path / "run.json").write_text((run / "run.json").read_text())
        with pytest.raises(ValueError, match=f"must be complete .* has no {result} yet"):
            starting_point(tmp_path, "sft")
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"command": "quickstart"}}))
    with pytest.raises(ValueError, match="is a run of None"):
        starting_point(tmp_path, "sft")


@pytest.mark.long
def test_a_second_stage_of_rl_starts_from_the_first(sft_run, rl_run, tmp_path, capsys):
    """Its reference is the first stage's result, or with reference=base the first one's own."""
    first = shutil.copytree(rl_run, tmp_path / "first")
    point = starting_point(first, "sft")
    assert (point.model, point.adapter, point.unmerged) == (str(first / "model"), None, first)
    assert point.preset is MODELS["arithmetic-base"]
    second = tmp_path / "second"
    for again in (False, True):  # the second time it is complete, and nothing is merged again
        assert train(first, second) == 0
        shown = capsys.readouterr().out
        assert f"π_ref: {first}/model, the model that RL starts from" in shown
        assert (f"{second} is finished: {second}/adapter" in shown.split("π_ref: ")[0]) is again
        assert ("completions a step" in shown) is not again  # the plan
    record = json.loads((tmp_path / "second" / "run.json").read_text())
    assert record["model_path"] == str(first / "model")
    assert read_metrics(tmp_path / "second")[0]["kl/ref_k3"] == 0

    # The merged model is the first stage's start with its adapter on.
    adapted, tokenizer = load_policy(sft_run / "model", adapter=first / "adapter")
    merged, before = (load_policy(path)[0] for path in (first / "model", sft_run / "model"))
    ids = torch.tensor([tokenizer("17*6=?")["input_ids"]])
    with torch.no_grad():
        expected, found, old = (m(input_ids=ids).logits for m in (adapted, merged, before))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (found - old).abs().max() > 1e-4

    again = starting_point(tmp_path / "second", "base")
    assert (again.model, again.adapter) == (str(first / "model"), tmp_path / "second" / "adapter")
    assert again.preset is MODELS["arithmetic-base"] and again.unmerged is None
    assert "which is trained further" in str(again)
    assert train(tmp_path / "second", tmp_path / "third", "--set", "reference=base") == 0
    third = json.loads((tmp_path / "third" / "run.json").read_text())
    assert third["model_path"] == str(first / "model")


def test_the_papers_tables_are_the_defaults_of_its_model():
    sft = sft_config(SEVEN_B)
    assert (sft.epochs, sft.batch_size, sft.learning_rate, sft.warmup_steps, sft.weight_decay) == (
        2,
        1,
        2e-4,
        5,
        0.01,
    )
    assert (sft.max_length, sft.seed, sft.lora.rank, sft.lora.alpha) == (2048, 3407, 8, 16)
    rl = rlvr_config(SEVEN_B)
    assert (rl.max_steps, rl.completions_per_step, rl.num_generations) == (1000, 8, 8)
    assert (rl.learning_rate, rl.warmup_ratio, rl.weight_decay, rl.beta) == (5e-6, 0.1, 0.01, 0.05)
    assert (rl.temperature, rl.min_p, rl.top_p, rl.epsilon, rl.epsilon_high) == (
        1.0,
        0.01,
        1.0,
        0.2,
        0.2,
    )
    distill = rlvr_config(MODELS["r1-distill-qwen-7b"])
    assert (distill.max_prompt_length, distill.max_completion_length) == (2048, 6144)
    assert rlvr_config(MODELS["qwen2.5-3b-instruct"]).full_finetuning


def test_the_card_decides_what_is_not_given():
    small, large = rlvr_config(SEVEN_B, 14.5), rlvr_config(SEVEN_B, 79.1)
    assert small.load_in_4bit and not large.load_in_4bit
    assert small.micro_batch_size < large.micro_batch_size == 8
    assert rlvr_config(SEVEN_B, 14.5, micro_batch_size=2).micro_batch_size == 2
    assert not rlvr_config(SEVEN_B, 14.5, load_in_4bit=False).load_in_4bit


@pytest.mark.parametrize("gib", [None, *(card.memory_gib for card in CARDS.values())])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_plan_and_the_training_it_is_for_agree(model, gib):
    """Without options of either; the run's length too."""
    config = rlvr_config(model, gib)
    trained, planned = run_setup(model, config, gib), plan_setup(model, gib)
    if gib is None and planned.weight_bits == 16:  # of a card; a CPU loads them in 32 bits
        planned = replace(planned, weight_bits=32)
    assert replace(trained, lora_targets=None) == planned
    assert config.max_steps == model.rl_steps


def test_a_run_that_goes_on_keeps_what_its_first_card_decided():
    first = vars(rlvr_config(SEVEN_B, 14.5))
    again = rlvr_config(SEVEN_B, 79.1, recorded=first)
    assert again == RlvrConfig(**first)
    assert rlvr_config(SEVEN_B, 79.1, recorded=first, load_in_4bit=False).load_in_4bit is False


def test_what_cannot_fit_is_refused_before_anything_is_loaded(
    sft_run, tmp_path, monkeypatch, capsys
):
    from sage_unsloth.training import recipes as stages

    distill = replace(MODELS["r1-distill-qwen-7b"])
    point = StartingPoint(distill, starting_point(sft_run, "sft").model)
    monkeypatch.setattr(stages, "starting_point", lambda *a: point)
    monkeypatch.setattr(
        stages, "resolve_rlvr", lambda *a, **k: pytest.fail("nothing is to be trained")
    )
    with pytest.raises(ValueError, match=r"(?s)must fit the GPU's 7.2 GiB.*What to change"):
        run_rlvr(tmp_path / "run", algorithm="grpo", start="x", memory=8.0, data="arithmetic")


def test_a_course_is_the_first_and_the_last_tenth():
    metrics = [{"step": i, "reward": float(i > 10)} for i in range(1, 21)]
    assert training_curve_rows(metrics) == [
        {"steps": "first 2", "reward": "0.000"},
        {"steps": "last 2", "reward": "1.000"},
    ]


def test_dead_groups_are_those_of_the_rule():
    """An all-wrong group teaches under nsr, though its rewards are equal."""
    step = {"frac_reward_zero_std": 0.75}
    assert training_curve_rows([step])[0]["dead"] == "0.750"
    assert training_curve_rows([step | {"advantages/dead_groups": 0.25}])[0]["dead"] == "0.250"


def test_an_algorithm_of_ones_own(sft_run, tmp_path):
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        ended = ()

        def on_step_end(self, args, state, control, **_):
            self.ended += (state.global_step,)

    own, steps = replace(get_algorithm("grpo"), name="mine", settings={"beta": 0.1}), Steps()
    settings = {"smoke": True, "preflight_prompts": 0, "callbacks": [steps]}
    run_rlvr(tmp_path / "run", algorithm=own, start=sft_run, **settings)
    assert steps.ended == (1, 2)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["beta"] == 0.1


@pytest.mark.long
def test_kill_9_and_the_same_command_gives_the_same_weights(sft_run, tmp_path):
    """A run in this process, and one in a process of its own that is killed after its third step
    and resumed in this one.
    """
    import os
    import signal
    import subprocess
    import sys
    import time

    from safetensors.torch import load_file

    def command(out):
        settings = ["max_steps=4", "save_steps=2", "learning_rate=5e-3"]
        words = ["train", "--algorithm", "sage-token", "--from", str(sft_run), "--smoke"]
        return [*words, "--out", str(out), "--set", *settings]

    assert main(command(tmp_path / "whole")) == 0
    with (tmp_path / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sage_unsloth", *command(tmp_path / "killed")],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    metrics = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline, (
            tmp_path / "log.txt"
        ).read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "adapter").exists()
    assert main(command(tmp_path / "killed")) == 0
    found, expected = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("killed", "whole")
    )
    assert all((found[name] == expected[name]).all() for name in expected)
    keys = ("step", "reward", "kl", "sage/guide_mean", "grad_norm")
    whole, killed = (
        [[row[k] for k in keys] for row in read_metrics(tmp_path / name)]
        for name in ("whole", "killed")
    )
    assert killed == whole
