"""Each check is a process: one that crashes, hangs or raises is one row, and the record goes on."""

import json
import os
from pathlib import Path

import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.selftest import command, process, run
from sage_unsloth.selftest.checks import Check, all_checks
from sage_unsloth.selftest.findings import FAILED, NOT_HERE, NOT_RUN, PASSED, Finding
from sage_unsloth.selftest.process import run_in_process
from sage_unsloth.selftest.run import run_selftest

TESTS = str(Path(__file__).parent)


def planted(function, seconds=30, **arguments):
    """A check of `planted.py`."""
    paths = os.pathsep.join(
        [TESTS, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    return Check(
        name=function,
        function=f"planted:{function}",
        arguments=arguments,
        seconds=seconds,
        environment={"PYTHONPATH": paths},
    )


@pytest.fixture
def go(tmp_path, monkeypatch):
    """`run_selftest` over planted checks: the record, the lines, the number of failures."""
    monkeypatch.chdir(tmp_path)

    def run_checks(*checks, **options):
        lines = []
        failures = run_selftest(
            command.SELFTEST_FILE, checks=checks, print_line=lines.append, **options
        )
        return json.loads((tmp_path / "selftest.json").read_text()), lines, failures

    return run_checks


def rows(report):
    return [(row["check"], row["name"], row["status"]) for row in report["findings"]]


def test_a_crash_is_one_row_and_the_rest_goes_on(go):
    report, lines, failures = go(planted("crashes"), planted("fine"))
    assert rows(report) == [
        ("crashes", "before the crash", PASSED),
        ("crashes", "crashes", FAILED),
        ("fine", "fine", PASSED),
    ]
    assert failures == 1 and "SIGSEGV" in report["findings"][1]["found"]
    assert "2 passed, 1 FAILED" in lines[-1]


@pytest.mark.long
def test_a_hang_is_ended_at_its_limit(monkeypatch):
    monkeypatch.setattr(Check, "limit", 6)
    monkeypatch.setattr(process, "MIN_SECONDS", 1.0)
    done = list(run_in_process(planted("hangs"), seconds=60))
    assert [f.name for f in done] == ["before the hang", "hangs"]
    assert done[1].status == FAILED and "within 6 s" in done[1].found and done[1].remedy


def test_an_error_is_named_without_the_paths_of_this_machine(go):
    report, _, failures = go(planted("raises"))
    (row,) = report["findings"]
    assert failures == 1 and row["found"].startswith("RuntimeError: no luck in <tmp>/sage_unsloth")
    assert row["found"].endswith("as ~/x says")
    text = json.dumps(report)
    for place in (os.path.expanduser("~"), os.getcwd(), os.environ["HF_TOKEN"]):
        assert place not in text
    assert "Traceback" in json.dumps(row["figures"]["log"])


def test_the_process_gets_no_secret_no_network_and_nothing_of_unsloths(go, monkeypatch):
    monkeypatch.setenv("UNSLOTH_GRPO_SEQ_PACKING", "0")
    report, _, _ = go(planted("tells"))
    assert report["findings"][0]["found"] == "[] 1"


def test_a_second_call_runs_what_failed_or_was_not_reached(go, monkeypatch):
    report, _, failures = go(planted("fine"), planted("bad"), seconds=0)
    assert [status for *_, status in rows(report)] == [NOT_RUN, NOT_RUN] and failures == 0
    assert "call the command again" in report["findings"][0]["remedy"]
    report, _, failures = go(planted("fine"), planted("bad"))
    assert [status for *_, status in rows(report)] == [PASSED, FAILED] and failures == 1
    started = []
    real = run.run_in_process
    monkeypatch.setattr(
        run, "run_in_process", lambda check, s: started.append(check.name) or real(check, s)
    )
    go(planted("fine"), planted("bad"))
    assert started == ["bad"], "what has passed is kept"
    go(planted("fine"), again=True)
    assert started == ["bad", "fine"]


def test_a_second_call_that_is_stopped_keeps_what_it_did_not_reach(go, monkeypatch):
    checks = planted("bad"), planted("crashes"), planted("fine")
    go(*checks)
    real = run.run_in_process

    def stop_at_the_second(check, seconds):
        if check.name == "crashes":
            raise KeyboardInterrupt
        return real(check, seconds)

    monkeypatch.setattr(run, "run_in_process", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        go(*checks)
    found = json.loads(Path("selftest.json").read_text())["findings"]
    assert [row["check"] for row in found] == ["bad", "fine"]


def test_other_versions_are_another_record(go, monkeypatch):
    go(planted("fine"))
    monkeypatch.setattr(run, "machine", lambda: {"device": "another"})
    _, lines, _ = go(planted("fine"))
    assert "all runs anew" in lines[0]


def test_another_file_is_not_overwritten(go, tmp_path):
    (tmp_path / "selftest.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="record of a self-test"):
        go(planted("fine"))
    assert json.loads((tmp_path / "selftest.json").read_text()) == {"mine": 1}


def test_what_is_not_possible_here_says_why_and_starts_nothing():
    check = Check(name="x", function="nothing:there", missing=lambda: "needs a GPU")
    assert list(run_in_process(check, 600)) == [
        Finding(check="x", name="x", status=NOT_HERE, found="needs a GPU")
    ]


def test_the_table_is_80_columns_wide(go):
    _, lines, _ = go(planted("fine", name="n" * 30, note="a longer sentence " * 12))
    assert max(len(line) for text in lines[:-1] for line in text.splitlines()) <= 80
    assert len(lines) > 4


@pytest.mark.smoke
def test_every_check_is_there_and_has_a_name_of_its_own():
    import importlib

    names = [check.name for check in all_checks()]
    assert len(set(names)) == len(names)
    for check in all_checks():
        module, _, function = check.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert check.limit <= 4 * 180


def test_doctor_runs_it_only_when_asked(monkeypatch, tmp_path, capsys):
    from sage_unsloth import doctor

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_checks", lambda: 0)
    called, real = [], run.run_selftest

    def run_selftest(file, again):
        called.append((file, again))
        return real(file, checks=[planted("fine")], print_line=lambda line: None)

    monkeypatch.setattr(run, "run_selftest", run_selftest)
    assert main(["doctor"]) == 0 and called == []
    assert main(["doctor", "--deep", "--again", "--out", "x.json"]) == 0
    assert called == [("x.json", True)]
    assert "| fine | passed |" in capsys.readouterr().out, "the block for a report"
    assert main(["doctor", "--again"]) == 2
    assert "need --deep" in capsys.readouterr().err
    assert command.SELFTEST_FILE == "selftest.json"
