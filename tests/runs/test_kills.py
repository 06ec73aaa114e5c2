"""Signals: what is in flight is saved, nothing is left behind, a folder belongs to one process."""

import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from queue import Empty

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from sage_unsloth.__main__ import IN_A_CLONE, main
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.models.device import frees_models
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.checkpoints import last_checkpoint
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.stopping import Terminated, finish_step, handle_stop_signals
from sage_unsloth.sampling.engines import Completion, InBatches, SamplingConfig
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import SftConfig, sft
from sage_unsloth.training.stage import METRICS, read_metrics, set_aside_rows

BASE = data_folder() / "arithmetic-base"
ROWS, TRAIN = arithmetic.problems("sft")[:32], arithmetic.problems("train")
SFT = SftConfig(max_steps=3, batch_size=4, learning_rate=5e-4, max_length=160)
RLVR = RlvrConfig(
    max_steps=3,
    prompts_per_step=2,
    max_completion_length=48,
    max_prompt_length=64,
    num_generations=4,
    learning_rate=5e-3,
    preflight_prompts=0,
    sample_steps=1,
)
HARNESS = Path(__file__).parents[1] / "kill_harness.py"
ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated, signal.SIGHUP: Terminated}


@pytest.fixture(autouse=True)
def ctrl_c_as_in_a_terminal():
    """A shell's background job, which this may be, is started to ignore it, and one under nohup
    SIGHUP.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize("signum", ENDS)
def test_the_first_signal_waits_and_the_second_does_not(signum, monkeypatch):
    monkeypatch.setattr("sage_unsloth.runs.stopping.REPEATED", 0.0)
    before = signal.getsignal(signum)
    steps = []
    with (
        pytest.raises(ENDS[signum], match=f"stopped by {signum.name}: step 2 is saved"),
        finish_step("this step") as stop,
    ):
        for step in (1, 2, 3):
            steps.append(step)
            if step == 2:
                signal.raise_signal(signum)
            stop.saved = f"step {step} is saved"
            if stop.cause is not None:
                break
    assert steps == [1, 2] and signal.getsignal(signum) == before
    with pytest.raises(ENDS[signum]), handle_stop_signals(), finish_step("this step") as stop:
        signal.raise_signal(signum)
        assert stop.cause is signum
        signal.raise_signal(signum)
        pytest.fail("the second one must not wait")
    assert signal.getsignal(signum) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "nothing ends the process later"


def test_a_shutdown_that_comes_twice_is_one():
    """From the system and from the parent; but Ctrl-C twice is meant."""
    with (
        pytest.raises(Terminated, match="SIGHUP") as raised,
        handle_stop_signals(),
        finish_step("this step"),
    ):
        for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(signum)
        done = True
    assert done and raised.value.code == 129
    with pytest.raises(Terminated), handle_stop_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # while everything is closed
    with pytest.raises(KeyboardInterrupt), handle_stop_signals(), finish_step("this step"):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("Ctrl-C must not wait")


def test_what_another_process_was_asked_is_no_first_signal():
    with pytest.raises(Terminated), finish_step("this step") as stop:
        stop.cause = signal.SIGTERM
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done


@pytest.mark.long
def test_a_parent_waits_for_the_step_in_flight_of_its_children(tmp_path):
    """Longer than everything else has for its end."""
    program = (
        "import signal, time\nsignal.signal(15, lambda *_: (time.sleep(1.5), print('saved', "
        "flush=True), exit(0)))\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    script = (
        "import subprocess, sys, time\nfrom pathlib import Path\n"
        "from sage_unsloth.runs import children, stopping\n"
        "stopping.UNWINDING = 0.5\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {program!r}], stdout=open('log', "
        f"'w'), start_new_session=True)\n"
        "while 'ready' not in Path('log').read_text(): time.sleep(0.05)\n"
        "print('go', flush=True)\n"
        "with stopping.handle_stop_signals():\n"
        "    try: time.sleep(60)\n"
        "    except BaseException: children.end_children([worker]); raise\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout.readline() == "go\n"
    time.sleep(1)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 143
    assert (tmp_path / "log").read_text() == "ready\nsaved\n"


def test_an_error_in_the_step_is_what_is_raised():
    with pytest.raises(ValueError, match="of the step"), finish_step("this step"):
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the step")


def test_signals_that_are_not_ours_stay_as_they_are():
    """In another thread Python sets no handlers; and a process may be started to ignore Ctrl-C, as
    a shell's background jobs are.
    """
    found = []

    def elsewhere():
        with finish_step("this step") as stop:
            found.append((signal.getsignal(signal.SIGINT), stop.cause))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(signal.getsignal(signal.SIGINT), None)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handle_stop_signals(), finish_step("this step") as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.cause is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_library_that_swallows_the_exception_ends_all_the_same(signum, code):
    """Bare excepts around imports take an interrupt for a missing package."""
    program = (
        "import signal, time\nfrom sage_unsloth.runs import stopping\nstopping.UNWINDING = 0.3\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with stopping.handle_stop_signals():\n"
        f"    try: signal.raise_signal({int(signum)})\n"
        "    except: pass\n"
        "    print('goes on', flush=True)\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=25
    )
    assert (done.returncode, done.stdout) == (code, "goes on\n")


@pytest.mark.parametrize("signum", ENDS)
def test_what_a_callback_drops_is_raised_again(signum, monkeypatch):
    """Python drops an exception in a weak reference's callback, which is where a signal may come
    while models are freed.
    """
    monkeypatch.setattr("sage_unsloth.runs.stopping.UNWINDING", 3600.0)
    hook = sys.unraisablehook

    class Thing:
        pass

    thing, before = Thing(), time.monotonic()
    with pytest.raises(ENDS[signum], match=f"stopped by {signum.name}"), handle_stop_signals():
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signum))
        del thing
        assert reference() is None
        time.sleep(5)
    assert time.monotonic() - before < 4
    assert sys.unraisablehook is hook and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_the_command_line_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    from sage_unsloth import quickstart

    for signum, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        monkeypatch.setattr(quickstart, "_run", lambda *a, s=signum: signal.raise_signal(s))
        assert main(["quickstart", "--out", str(tmp_path / "a run")]) == code
        err = capsys.readouterr().err
        assert f"stopped by {signum.name}" in err
        assert f"To resume: python -m sage_unsloth quickstart --out '{tmp_path}/a run'" in err


def test_rows_of_steps_that_are_trained_again_are_kept_aside(tmp_path, caplog):
    path, rows = tmp_path / METRICS, [{"step": step, "é": step} for step in (1, 1, 2, 3, 4)]
    aside = tmp_path / "metrics.replaced.jsonl"
    for resume, kept in (
        (tmp_path / "checkpoint-4", rows),
        (tmp_path / "checkpoint-2", rows[:3]),
        (None, []),
    ):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        with path.open("a") as file:
            file.write('{"step": 5, "cut')
        caplog.clear()
        aside.unlink(missing_ok=True)
        set_aside_rows(path, resume)
        assert read_jsonl(path) == kept
        assert (read_jsonl(aside) if aside.exists() else []) == rows[len(kept) :]
        assert (str(aside) in caplog.text) == (kept != rows)
    set_aside_rows(path, None)
    assert read_jsonl(aside) == rows, "a second resume keeps what the first one put there"
    set_aside_rows(tmp_path / "none", None)
    assert not (tmp_path / "none").exists()


def weights(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_equal_weights(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_equal_folders(found, expected):
    """Every file to the last byte."""
    files = [{f.name: f.read_bytes() for f in folder.iterdir()} for folder in (found, expected)]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[1] if files[0][name] != files[1][name]] == []


@pytest.fixture(scope="module")
def merged(unsloth_module, tmp_path_factory):
    return sft(SFT, BASE, ROWS, tmp_path_factory.mktemp("whole") / "sft")


@pytest.fixture(scope="module")
def trained(merged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "rl"
    adapter = rlvr(RLVR, merged, TRAIN, folder, BranchGuide(ratio=0.0))
    assert any(value.any() for name, value in weights(adapter).items() if "lora_B" in name)
    return folder


def signal_in_step(monkeypatch, number, signum):
    from transformers import Trainer

    step, steps = Trainer.training_step, []

    def signalled(self, *args, **kwargs):
        steps.append(1)
        if len(steps) == number:
            signal.raise_signal(signum)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", signalled)
    return steps


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])  # SIGTERM in the next test
def test_sft_saves_the_step_in_flight(merged, tmp_path, monkeypatch, signum):
    """Though `save_steps` is 100; and the lock is free again."""
    steps = signal_in_step(monkeypatch, 2, signum)
    with (
        handle_stop_signals(),
        pytest.raises(ENDS[signum], match=f"{signum.name}: step 2 of 3 is saved in "),
    ):
        sft(SFT, BASE, ROWS, tmp_path)
    assert last_checkpoint(tmp_path / "checkpoints").name == "checkpoint-2"
    with exclusive_lock(tmp_path):
        pass
    assert sft(SFT, BASE, ROWS, tmp_path) and len(steps) == 3
    assert_equal_weights(weights(tmp_path / "model"), weights(merged))
    whole = read_metrics(merged.parent)
    assert [row["loss"] for row in read_metrics(tmp_path)] == [row["loss"] for row in whole]


def test_sft_stopped_after_its_last_checkpoint_trains_no_further(merged, tmp_path, monkeypatch):
    """The trainer itself would train a fourth step of three."""
    steps = signal_in_step(monkeypatch, 3, signal.SIGTERM)
    with handle_stop_signals(), pytest.raises(Terminated, match="step 3 of 3 is saved"):
        sft(SFT, BASE, ROWS, tmp_path)
    sft(SFT, BASE, ROWS, tmp_path)
    assert len(steps) == 3 == len(read_jsonl(tmp_path / METRICS))
    for name in ("model", "adapter"):
        assert_equal_folders(tmp_path / name, merged.parent / name)


@pytest.mark.long
def test_rl_saves_the_step_in_flight_and_repeats_no_row(
    merged, trained, tmp_path, monkeypatch, unsloth_module
):
    """SIGTERM in the second step saves it; a second Ctrl-C in the third is at once, and that step
    is trained again.
    """
    patched = dict(vars(unsloth_module))
    signal_in_step(monkeypatch, 2, signal.SIGTERM)
    with (
        handle_stop_signals(),
        pytest.raises(Terminated, match="SIGTERM: step 2 of 3 is saved in "),
    ):
        rlvr(RLVR, merged, TRAIN, tmp_path, BranchGuide(ratio=0.0))
    monkeypatch.undo()
    assert {k for k, v in vars(unsloth_module).items() if v is not patched.get(k)} == set(), (
        "the patch must be undone"
    )
    assert not (tmp_path / "adapter").exists()
    assert last_checkpoint(tmp_path / "checkpoints").name == "checkpoint-2"

    save = PeftModel.save_pretrained

    def twice(self, folder, *args, **kwargs):
        if "checkpoint-3" in str(folder):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return save(self, folder, *args, **kwargs)

    monkeypatch.setattr(PeftModel, "save_pretrained", twice)
    with handle_stop_signals(), pytest.raises(KeyboardInterrupt):
        rlvr(RLVR, merged, TRAIN, tmp_path, BranchGuide(ratio=0.0))
    monkeypatch.undo()
    assert [row["step"] for row in read_jsonl(tmp_path / METRICS)] == [1, 2, 3]
    assert_equal_weights(
        weights(rlvr(RLVR, merged, TRAIN, tmp_path, BranchGuide(ratio=0.0))),
        weights(trained / "adapter"),
    )
    for name, times in ((METRICS, ("seconds", "step_time")), ("completions.jsonl", ())):
        found, expected = (
            [{k: v for k, v in row.items() if k not in times} for row in read_jsonl(folder / name)]
            for folder in (tmp_path, trained)
        )
        assert found == expected, name


def models():
    from transformers import PreTrainedModel

    gc.collect()
    return {id(found) for found in gc.get_objects() if issubclass(type(found), PreTrainedModel)}


def test_an_interrupt_leaves_no_model_behind_though_its_traceback_is_kept(
    merged, tmp_path, monkeypatch
):
    """As a notebook keeps it: sys.last_traceback holds every frame, and a frame its variables."""
    before = models()
    signal_in_step(monkeypatch, 1, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as kept:
        rlvr(RLVR, merged, TRAIN, tmp_path, BranchGuide())
    assert kept.tb is not None and models() <= before


def test_an_interrupt_frees_what_the_errors_before_it_hold():
    class Model:
        pass

    @frees_models
    def run():
        model = Model()
        try:
            raise ValueError("first")
        except ValueError:
            inner(model)

    def inner(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, Model)]


class Slow(InBatches):
    """An engine that is sent a signal while it draws its second batch."""

    name = "transformers"

    def __init__(self, tokenizer, signum):
        self.tokenizer, self.signum, self.calls = tokenizer, signum, 0

    def draw(self, prompts, seeds, config):
        self.calls += 1
        if self.calls == 2 and self.signum is not None:
            signal.raise_signal(self.signum)
        return [Completion(f"<SOLUTION>{seed}</SOLUTION>", 3, "stop") for seed in seeds]


@pytest.mark.parametrize("signum", ENDS)
def test_the_batch_in_flight_is_graded_and_kept(tmp_path, make_tokenizer, signum):
    rows = [{"id": str(i), "problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]
    config = SamplingConfig(num_samples=2, max_completion_length=8, batch_size=2)

    def draw(path, engine):
        return sample_and_grade(config, engine, rows, path, model="m", benchmark="b")

    tokenizer = make_tokenizer()
    with (
        handle_stop_signals(),
        pytest.raises(ENDS[signum], match=f"stopped by {signum.name}: everything"),
    ):
        draw(tmp_path / "cut.jsonl", Slow(tokenizer, signum))
    assert len(read_jsonl(tmp_path / "cut.jsonl")) == 4, "two batches of two"
    again, whole = Slow(tokenizer, None), Slow(tokenizer, None)
    found, expected = draw(tmp_path / "cut.jsonl", again), draw(tmp_path / "whole.jsonl", whole)
    assert (again.calls, whole.calls) == (2, 4)
    assert found == expected and len(found) == 8


def test_a_grading_worker_outlives_sigterm():
    """A machine that is taken away may send it to all processes, while the step in flight still
    needs its grades.
    """
    with Grader() as grader:
        pair = (["<SOLUTION>1+x</SOLUTION>"], ["x+1"])
        assert grader.grade_many(*pair) == [Grade.CORRECT]
        (worker,) = grader._workers.all
        pid = worker.process.pid
        os.kill(pid, signal.SIGTERM)
        assert grader.grade_many(["<SOLUTION>2+x</SOLUTION>"], ["x+2"]) == [Grade.CORRECT]
        assert worker.process.pid == pid and worker.process.poll() is None


def record_file(folder):
    """A record set of one record."""
    settings = {"model": "m", "benchmark": "b", "engine": "transformers", "sampling": {}}
    (folder / "m.settings.json").write_text(json.dumps({"format": 2, "settings": settings}))
    record = {
        "problem_id": "1",
        "sample": 0,
        "grade": "correct",
        "gold": "1",
        "num_tokens": 1,
        "finish_reason": "stop",
    }
    (folder / "m.jsonl").write_text(json.dumps(record) + "\n")
    return folder / "m.jsonl"


@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        "analyze",
        "compare",
        "export",
        "sft",
        "train",
        "evaluate",
        "cost",
        "study",
    ],
)
def test_a_second_process_is_refused(name, tmp_path, merged, trained, capsys):
    """Every command that writes; nothing is touched in the folder that the other one holds."""
    out = tmp_path / "out"
    base, run = str(BASE), merged.parent
    if name == "export":
        run = tmp_path / "run"
        run.mkdir()
        for file in ("run.json", METRICS, "adapter"):
            (run / file).symlink_to(trained / file)
    command = {
        "quickstart": ["--smoke"],
        "analyze": [str(trained)],
        "compare": [str(record_file(tmp_path))],
        "export": [str(run), "--to", "adapter"],
        "sft": ["--model", "arithmetic-base", "--smoke"],
        "train": ["--algorithm", "grpo", "--from", base, "--smoke", "--data", "arithmetic"],
        "evaluate": [
            "--models",
            f"m={base}",
            "--benchmarks",
            "arithmetic",
            "--problems",
            "1",
            "--n",
            "1",
        ],
        "study": ["--smoke", "--task", "arithmetic", "--methods", "grpo=0.05"],
        "cost": ["--small", "--steps", "0", "--rounds", "1"],
    }
    words = [*command[name], "--out", str(out)]
    with exclusive_lock(out):
        if name in IN_A_CLONE:
            assert importlib.import_module(f"research.{name}.command").main(words) == 2
        else:
            assert main([name, *words]) == 2
    assert "one process at a time may write to" in capsys.readouterr().err
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.long
def test_killed_lives_end_as_a_run_that_was_left_alone(tmp_path):
    """The harness at its smallest; what it found at 50 moments of four commands is in
    data/results/reliability.
    """
    words = [
        "--out",
        str(tmp_path),
        "--moments",
        "2",
        "--commands",
        "sft",
        "--fresh",
        "0",
        "--seed",
        "1",
    ]
    done = subprocess.run([sys.executable, str(HARNESS), *words], capture_output=True, text=True)
    report = json.loads((tmp_path / "kills.json").read_text())
    assert done.returncode == 0, report["wrong"]
    assert report["moments"] == 2 and report["wrong"] == []


NOTEBOOK = """
from pathlib import Path
from sage_unsloth.trainers.loading import load_unsloth
module = load_unsloth()
before = dict(vars(module))
from sage_unsloth.problems import arithmetic
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
config = RlvrConfig(
    max_steps={steps}, prompts_per_step=1, max_completion_length=16, max_prompt_length=64,
    num_generations=2, preflight_prompts=0,
)
"""
RUN = "rlvr(config, {base!r}, arithmetic.problems('train'), Path({out!r}), BranchGuide())"
LOOK = """
import gc, signal, psutil
from transformers import PreTrainedModel
gc.collect()
print(dict(
    models=sum(issubclass(type(found), PreTrainedModel) for found in gc.get_objects()),
    patched=sorted(
        k for k, v in vars(module).items() if v is not before.get(k) and not k.startswith('__')
    ),
    workers=len(psutil.Process().children()),
    handler=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
))
"""


@pytest.mark.long
def test_a_notebook_is_usable_after_an_interrupt(tmp_path):
    """A real kernel: interrupted in training, it has saved the step, holds nothing, and the same
    cell goes on.
    """
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path))
    out, metrics = tmp_path / "run", tmp_path / "run" / METRICS

    def run(code, interrupt=False):
        texts = []
        request = client.execute(code)
        while True:
            if interrupt and metrics.exists() and len(read_jsonl(metrics)) >= 2:
                manager.interrupt_kernel()
                interrupt = False
            try:
                message = client.get_iopub_msg(timeout=0.2)
            except Empty:
                assert manager.is_alive()
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            texts.append(content.get("text", "") + content.get("evalue", ""))
            if content.get("execution_state") == "idle":
                return "".join(texts)

    try:
        cell = RUN.format(base=str(BASE), out=str(out))
        assert "Error" not in run(NOTEBOOK.format(steps=24))
        said = run(cell, interrupt=True)
        (step,) = re.findall(r"stopped by SIGINT: step (\d+) of 24 is saved", said)
        assert last_checkpoint(out / "checkpoints").name == f"checkpoint-{step}"
        with exclusive_lock(out):
            pass
        free = "{'models': 0, 'patched': [], 'workers': 0, 'handler': True}"
        assert free in run(LOOK)
        assert "Error" not in run(cell)
        assert (out / "adapter").is_dir()
        assert [row["step"] for row in read_jsonl(metrics)] == list(range(1, 25))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
