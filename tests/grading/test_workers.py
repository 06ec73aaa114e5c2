"""Workers: what ends one, what is asked again, and what a batch of hanging answers may cost."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sage_unsloth.grading import worker as worker_module
from sage_unsloth.grading import workers as workers_module
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import TYPICAL
from sage_unsloth.grading.worker import LATE, Worker
from sage_unsloth.grading.workers import CUT_SHORT, Workers
from sage_unsloth.prompts import SOLUTION_END, SOLUTION_START

COMPARE = "sage_unsloth.grading.mathematics:compare_math"


def tagged(answer):
    return f"{SOLUTION_START}{answer}{SOLUTION_END}"


@pytest.fixture
def function(tmp_path, monkeypatch):
    """A factory of functions for a worker, by the body of `def run(a, g)`; ("x", "x") is None."""
    made = []

    def make(body, **arguments):
        name = f"function_{len(made)}"
        (tmp_path / f"{name}.py").write_text(
            "import os, time\n\nkept = []\n\n\ndef run(a, g):\n    if a == 'x':\n"
            "        return None\n" + textwrap.indent(textwrap.dedent(body), "    ")
        )
        settings = {"count": 1, "time_limit": 20.0, "memory_limit_gib": 1.0} | arguments
        made.append(Workers(f"{name}:run", **settings))
        return made[-1]

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for workers in made:
        workers.stop()


def test_a_worker_that_dies_once_is_asked_again_and_twice_is_late(function):
    workers = function("return str(os.getpid()) if a == 'pid' else time.sleep(0.6) or 'late'")
    (worker,) = workers.all
    (pid,) = workers.ask([("pid", "")])
    assert worker.pid == int(pid) != worker.process.pid
    first = worker.pid

    def kill(times):
        for _ in range(times):
            time.sleep(0.25)
            os.kill(worker.pid, signal.SIGKILL)

    for times, expected in ((1, "late"), (2, LATE)):
        killer = threading.Thread(target=kill, args=(times,))
        killer.start()
        assert workers.ask([("wait", "")]) == [expected]
        killer.join()
    assert worker.deaths == 1
    (pid,) = workers.ask([("pid", "")])
    assert int(pid) != first


def test_a_child_is_replaced_within_a_fraction_of_a_start(function):
    workers = function("return time.sleep(9)", time_limit=0.1)
    (worker,) = workers.all
    worker.start()
    first, started = worker.process.pid, time.monotonic()
    for _ in range(10):
        assert worker.ask(("y", "")) is LATE
    assert time.monotonic() - started < 10 * 0.1 + 2, "a Python that starts takes longer"
    assert worker.process.pid == first


def test_a_child_without_memory_is_no_verdict_and_a_fresh_one_answers(function):
    """As math-verify does, the function catches a MemoryError and says that it cannot read."""
    workers = function(
        """
        try:
            while len(kept) < 10_000 and a == "fill":
                kept.append(bytearray(2**20))
            [bytearray(2**19) for _ in range(40)]
        except MemoryError:
            return None
        return [len(kept), "read"]
        """,
        memory_limit_gib=0.4,
    )
    (worker,) = workers.all
    assert workers.ask([("fill", "")]) == [LATE], "twice, and no None, which is a bad gold"
    assert workers.ask([("small", "")]) == [[0, "read"]]
    assert worker.deaths == 1


def test_a_gold_that_a_child_cannot_read_is_asked_in_a_fresh_one(function):
    """Where the kernel does not tell how near the limit was, or the memory was gone at once."""
    workers = function("kept.append(a)\nreturn ['read', len(kept)] if len(kept) < 3 else None")
    answers = workers.ask([(str(number), "") for number in range(4)])
    assert answers == [["read", 1], ["read", 2], ["read", 1], ["read", 2]]


def test_a_gold_that_cannot_be_read_is_none(function):
    workers = function("return None")
    assert workers.ask([("y", ""), ("z", "")]) == [None, None]


def test_memory_stays_flat_whatever_a_library_keeps(function):
    workers = function("kept.append(bytearray(b'1') * (8 * 2**20))\nreturn str(len(kept))")
    counts = [int(count) for count in workers.ask([("y", "")] * 60)]
    assert max(counts) <= 9, "64 MiB and the one more that passes them"
    assert len(counts) == 60 and counts.count(1) > 5


@pytest.mark.long
def test_a_batch_of_hanging_questions_keeps_to_its_budget_and_the_others_are_answered(function):
    body = """
        while a == "hang":
            pass
        return "done"
    """
    workers = function(body, count=2, time_limit=1.0)
    questions = [("hang", str(number)) for number in range(60)] + [("fine", "")] * 3
    for worker in workers.all:
        worker.start()
    started = time.monotonic()
    answers = workers.ask(questions)
    seconds = time.monotonic() - started
    # 60 x .1 s (.3 s on a busy machine) over two workers, then 4 s; with the whole limit, 30 s.
    assert seconds < 20
    assert answers[60:] == ["done"] * 3
    assert [answer in (LATE, CUT_SHORT) for answer in answers[:60]] == [True] * 60
    assert 8 <= answers.count(LATE) <= 10, "four seconds of two workers had the whole limit"


def test_slow_questions_are_answered_however_many_they_are(function):
    workers = function("time.sleep(0.15)\nreturn 'done'", count=2, time_limit=0.5)
    assert workers.ask([("y", "")] * 40) == ["done"] * 40, "6 s of work, budget of 4"


def test_what_was_cut_short_is_not_remembered(monkeypatch):
    value = CUT_SHORT
    with Grader() as grader:
        monkeypatch.setattr(grader._workers, "ask", lambda questions: [value] * len(questions))
        assert grader.grade_many([tagged("x+1")], ["1+x"]) == [Grade.TIMED_OUT]
        value = LATE
        assert grader.grade_many([tagged("x+1")], ["1+x"]) == [Grade.TIMED_OUT]
        value = ["wrong", "text"]  # which only this stand-in for a worker says of x+2 and 2+x
        assert grader.grade_many([tagged("x+1")], ["1+x"]) == [Grade.TIMED_OUT], "had its time"
        assert grader.grade_many([tagged("x+2")], ["2+x"]) == [Grade.WRONG]


# --- through the grader ---------------------------------------------------------------------------


def worker_that(compare, monkeypatch):
    """Replaces what the next workers run for each pair, after the warm-up."""
    known = [("x", "x"), *TYPICAL]
    body = f"r.compare_math = lambda a, g: None if (a, g) in {known!r} else {compare}"
    code = worker_module._START.replace(
        "; serve(", f"; import os, sage_unsloth.grading.mathematics as r; {body}; serve("
    )
    assert "r.compare_math" in code
    monkeypatch.setattr(worker_module, "_START", code)


def test_running_out_of_memory_counts_as_timed_out(monkeypatch):
    worker_that("str(len(bytearray(2**30)))", monkeypatch)
    with Grader(memory_limit_gib=0.5) as grader:
        assert grader.grade_many([tagged("y+z")], ["z+y"]) == [Grade.TIMED_OUT]


def test_broken_code_raises_and_is_no_grade(monkeypatch):
    worker_that("undefined_name", monkeypatch)
    with Grader() as grader, pytest.raises(RuntimeError, match="undefined_name"):
        grader.grade_many([tagged("y+z")], ["z+y"])


def test_a_worker_that_cannot_start_raises(monkeypatch):
    monkeypatch.setattr(worker_module, "_START", "raise SystemExit('no such package')")
    with Grader() as grader, pytest.raises(RuntimeError, match="did not start within"):
        grader.grade_many([tagged("y+z")], ["z+y"])


def test_a_child_that_cannot_start_ends_its_worker(monkeypatch, capfd):
    code = worker_module._START.replace(
        "; serve(",
        "; import sage_unsloth.grading.worker_process as p; p.confine = None; serve(",
    )
    monkeypatch.setattr(worker_module, "_START", code)
    with Grader() as grader, pytest.raises(RuntimeError, match="did not start within"):
        grader.grade_many([tagged("y+z")], ["z+y"])
    assert "not callable" in capfd.readouterr().err


def test_what_a_worker_prints_is_no_reply(monkeypatch):
    worker_that("print('noise') or ['wrong', 'text']", monkeypatch)
    with Grader() as grader:
        assert grader.grade_many([tagged("y+z")], ["z+y"]) == [Grade.WRONG], "the stand-in's grade"


def test_children_are_replaced_before_they_grow_old(function, monkeypatch):
    monkeypatch.setattr(worker_module, "QUESTIONS_PER_CHILD", 2)
    pids = function("return str(os.getpid())").ask([("y", "")] * 5)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 1]


def test_a_worker_whose_caller_is_gone_ends_itself():
    script = f"""
        from sage_unsloth.grading.worker import Worker
        worker = Worker({COMPARE!r}, 0.5, 1.0)
        worker.start()
        print(worker.process.pid, worker.pid, flush=True)
        worker.process.stdin.write(b'[1, "10^{{10^{{10}}}}", "42"]\\n')
        import os; os._exit(1)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        **dict(text=True, capture_output=True, timeout=60, check=False, env=environment),
    )
    processes = [int(pid) for pid in done.stdout.split()]
    assert len(processes) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_stopped_worker_leaves_no_process():
    worker = Worker(COMPARE, 5.0, 1.0)
    worker.start()
    processes = [worker.process.pid, worker.pid]
    assert all(is_running(pid) for pid in processes)
    worker.stop()
    time.sleep(0.2)
    assert not any(is_running(pid) for pid in processes)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_budget_is_what_the_documents_say():
    assert (
        workers_module.BATCH_LIMITS,
        workers_module.QUICK_FRACTION,
        workers_module.QUICK_MINIMUM,
    ) == (
        8,
        0.05,
        0.1,
    )
