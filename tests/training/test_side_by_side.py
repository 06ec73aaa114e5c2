"""RL runs beside each other: how many, what is shown, errors and signals. That they end as one
after another is a test of the quickstart's.
"""

import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tqdm import tqdm

from sage_unsloth.models.device import has_gpu
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.runs.children import available_memory
from sage_unsloth.training import side_by_side
from sage_unsloth.training.rows import METRICS
from sage_unsloth.training.side_by_side import (
    Job,
    SideBySideError,
    choose_processes,
    run_side_by_side,
)


def jobs(folder, *names, guide=None):
    return [
        Job(
            name=name,
            work="sage_unsloth.training.rlvr_stage:rlvr",
            arguments={"guide": guide},
            folder=folder / name,
            result=folder / name / "adapter",
            max_steps=4,
        )
        for name in names
    ]


@pytest.fixture
def child(monkeypatch):
    monkeypatch.setattr(side_by_side, "WORKER", "side_by_side_child")


def test_memory_is_what_system_and_control_group_leave(tmp_path):
    assert available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    3000 kB\n")
    assert available_memory(tmp_path) == 3000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    (group / "memory.current").write_text("1100\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 3000 * 1024
    (group / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000, "files that are read can be dropped"
    assert 2**20 < (available_memory() or 0) < 2**50


@pytest.mark.skipif(has_gpu(), reason="runs share a GPU")
def test_as_many_as_cores_and_memory_allow(tmp_path, monkeypatch):
    two, gib = jobs(tmp_path, "a", "b"), 2**30
    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(side_by_side, "available_memory", lambda: 40 * gib)
    if len(cores) > 1:
        assert choose_processes(two, None, long=True) == (2, "a core for each")
        monkeypatch.setattr(side_by_side, "available_memory", lambda: 3 * gib)
        count, why = choose_processes(two, None, long=True)
        assert count == 1 and "3.0 GiB of memory free, a run takes 2 GiB" in why
    os.sched_setaffinity(0, {min(cores)})
    try:
        count, why = choose_processes(two, None, long=True)
        assert count == 1 and why.startswith("1 core,")
        assert choose_processes(two, 4, long=True) == (2, "as requested")
    finally:
        os.sched_setaffinity(0, cores)
    assert choose_processes(two, None, long=False)[0] == 1
    assert choose_processes(two[:1], 2, long=True) == (1, "one run is left")
    own = BranchGuide()
    object.__setattr__(own, "function", lambda: None)
    assert choose_processes(jobs(tmp_path, "a", "b", guide=own), None, long=True) == (
        1,
        "the guide of a, b cannot be sent to another process",
    )
    with pytest.raises(ValueError, match="processes must be >= 1, got 0"):
        choose_processes(two, 0, long=True)


def test_what_they_say_is_logged_by_name_and_nothing_is_left(child, tmp_path, caplog, capfd):
    caplog.set_level("INFO")
    found = run_side_by_side(jobs(tmp_path, "a", "b", "c"), 2, tmp_path / "processes")
    assert found == {"a": 1.5, "b": 1.5, "c": 1.5}
    assert not (tmp_path / "processes").exists()
    lines, shown = [record.getMessage() for record in caplog.records], capfd.readouterr().err
    for name in "abc":
        assert [line for line in lines if line.startswith(f"{name}: ")] == [
            f"{name}: one line",
            f"{name}: another line",
        ]
        assert re.search(rf"^{name}:.* 1/4 .*reward 0\.250", shown, re.MULTILINE), shown


def test_an_error_in_one_ends_the_others_with_their_step_and_names_it(child, tmp_path):
    started = time.monotonic()
    with pytest.raises(SideBySideError) as found:
        run_side_by_side(jobs(tmp_path, "waits", "fails"), 2, tmp_path / "processes")
    assert time.monotonic() - started < 30
    assert str(found.value).startswith("fails stopped: ValueError: the guide must be finite (exit")
    process = int((tmp_path / "waits" / "saved").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_process_that_was_killed_says_what_it_wrote_last(child, tmp_path):
    with pytest.raises(SideBySideError, match=r"dies stopped: out of memory, as it .*code -9, log"):
        run_side_by_side(jobs(tmp_path, "dies"), 2, tmp_path / "processes")
    assert (tmp_path / "processes" / "dies" / "log.txt").is_file()


@pytest.mark.long
def test_a_signal_is_passed_on_and_what_they_save_is_waited_for(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom test_side_by_side import jobs\n"
        "from sage_unsloth.runs.stopping import handle_stop_signals\n"
        "from sage_unsloth.training import side_by_side\n"
        "side_by_side.WORKER = 'side_by_side_child'\nhere = Path(sys.argv[1])\n"
        "with handle_stop_signals():\n"
        "    side_by_side.run_side_by_side(jobs(here, 'waits'), 2, here / 'processes')\n"
    )
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([*sys.path, str(tests), str(tests / "training")])
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "processes" / "waits" / "said.txt").exists():
        assert parent.poll() is None
        time.sleep(0.1)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 143
    assert (tmp_path / "waits" / "saved").exists()


def test_a_bar_goes_back_to_the_checkpoint_from_which_a_run_resumes():
    """A pace counted from the lost steps would be negative."""
    bar = tqdm(total=50, initial=40, file=io.StringIO())
    side_by_side.show_step(bar, 25)
    bar.start_t -= 10  # seconds ago
    side_by_side.show_step(bar, 30)
    numbers = bar.format_dict
    assert (numbers["n"] - numbers["initial"]) / numbers["elapsed"] == pytest.approx(0.5, rel=0.05)
    bar.close()


def test_bars_that_are_switched_off_are_no_error(tmp_path, child, monkeypatch):
    monkeypatch.setattr(side_by_side, "progress", partial(tqdm, disable=True))
    (job,) = jobs(tmp_path, "a")
    job = replace(job, samples=(tmp_path / "x",), num_completions=10)
    with side_by_side._Child(job, tmp_path / "processes", 1) as run:
        run.process.wait(60)
        (tmp_path / "a" / METRICS).write_text('{"step": 4}\n')
        (tmp_path / "x").mkdir()
        for text in ("{}\n", "{}\n{}\n"):
            (tmp_path / "x" / "own.jsonl").write_text(text)
            run.show()


def test_an_evaluation_has_a_bar_of_the_completions_on_disk(tmp_path, child, monkeypatch):
    bars = []

    def bar(**options):
        bars.append(tqdm(**options, file=io.StringIO()))
        return bars[-1]

    monkeypatch.setattr(side_by_side, "progress", bar)
    (job,) = jobs(tmp_path, "a")
    job = replace(job, samples=(tmp_path / "x", tmp_path / "y"), num_completions=10)
    metrics, record = tmp_path / "a" / METRICS, tmp_path / "x" / "samples" / "own.jsonl"
    with side_by_side._Child(job, tmp_path / "processes", 1) as run:
        run.process.wait(60)
        metrics.write_text('{"step": 3}\n')
        run.show()
        record.parent.mkdir(parents=True)
        record.write_text("{}\n{}\n{")
        run.show()
        assert [(bar.unit, bar.n) for bar in bars] == [("step", 3)], "training is not complete"
        metrics.write_text('{"step": 3}\n{"step": 4}\n')
        run.show()
        (tmp_path / "y").mkdir()
        (tmp_path / "y" / "own.jsonl").write_text("{}\n")
        with record.open("a") as stream:
            stream.write("}\n{}\n")
        run.show()
    first, second = bars
    assert (first.unit, first.n, first.disable) == ("step", 4, True)
    assert (second.unit, second.initial, second.n, second.total) == ("completion", 2, 5, 10)
    assert second.desc == "a, evaluation"
