"""Records survive kills at any byte, and a folder belongs to one run."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_unsloth.runs import record as records
from sage_unsloth.runs.checkpoints import is_last
from sage_unsloth.runs.files import append_jsonl, read_jsonl, write_json
from sage_unsloth.runs.locks import HeldError, exclusive_lock
from sage_unsloth.runs.record import environment, open_run

ROWS = [{"id": 1, "text": "a\nb"}, {"id": 2, "text": "é {x} \u2028"}]


@pytest.mark.smoke
def test_write_json_and_back(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, None, "é"]})
    write_json(tmp_path / "a.json", {"b": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("broken", ["dumps", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    def fail(*_):
        raise OSError("no space left")

    write_json(tmp_path / "a.json", {"old": 1})
    if broken != "dumps":
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises(TypeError if broken == "dumps" else OSError):
        write_json(tmp_path / "a.json", {"new": object() if broken == "dumps" else 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_file_and_folder_reach_the_disk_before_and_after_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append("replace") or replace(a, b))
    write_json(tmp_path / "a.json", 1)
    assert calls == ["fsync", "replace", "fsync"]
    append_jsonl(tmp_path / "a.jsonl", ROWS)
    assert calls[3:] == ["fsync"]


@pytest.mark.smoke
def test_jsonl_and_back(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, [])
    assert read_jsonl(path) == []
    append_jsonl(path, ROWS)
    append_jsonl(path, iter(ROWS[:1]))
    assert read_jsonl(path) == [*ROWS, ROWS[0]]


def test_a_failed_append_writes_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, ROWS)
    with pytest.raises(TypeError):
        append_jsonl(path, [{"id": 3}, {"id": object()}])
    assert read_jsonl(path) == ROWS


@pytest.mark.smoke
def test_a_kill_at_any_byte_of_the_last_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    first, second = (json.dumps(row, ensure_ascii=False).encode() for row in ROWS)
    for cut in range(len(second) + 1):
        path.write_bytes(first + b"\n" + second[:cut])
        whole = ROWS if cut == len(second) else ROWS[:1]
        assert read_jsonl(path) == whole
        append_jsonl(path, [{"id": 3}])
        assert read_jsonl(path) == [*whole, {"id": 3}]


@pytest.mark.parametrize("content", [b"", b"{", b'{"id": 1', b"nul"])
def test_a_kill_in_the_only_line(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert read_jsonl(path) == []
    append_jsonl(path, ROWS)
    assert read_jsonl(path) == ROWS


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 200_000])
def test_a_long_cut_line(tmp_path, length):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, ROWS)
    with path.open("a") as file:
        file.write('{"text": "'.ljust(length, "x"))
    append_jsonl(path, ROWS)
    assert read_jsonl(path) == ROWS * 2


@pytest.mark.parametrize("line", ['{"id": ', "", "[1]", "7", "{} {}", "\udcff"])
@pytest.mark.parametrize("rest", ["", '{"id": 3}\n'])
def test_a_corrupt_line_that_has_an_end_is_an_error(tmp_path, line, rest):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n' + f"{line}\n{rest}".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"line 2 of .*rows\.jsonl\. Repair"):
        read_jsonl(path)


def test_environment():
    here = environment()
    assert here["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(here["packages"]) == set(records.PACKAGES)
    assert here["packages"]["math-verify"].count(".") == 2
    assert here["cpu_count"] >= 1
    assert here["date"].endswith("+00:00")
    assert json.loads(json.dumps(here)) == here


def test_a_missing_package_has_no_version(monkeypatch):
    monkeypatch.setattr(records, "PACKAGES", ("no-such-package-anywhere",))
    assert environment()["packages"] == {"no-such-package-anywhere": None}


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    module = tmp_path / "package" / "runs" / "record.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(records, "__file__", str(module))
    assert environment()["commit"] is None  # no repository
    git("init")
    module.write_text("1\n")
    (tmp_path / "other").write_text("1\n")
    git("add", "other")
    git("commit", "-m", "m")
    assert environment()["commit"] is None  # installed inside somebody else's repository
    git("add", "package")
    git("commit", "-m", "m")
    head = git("rev-parse", "HEAD")
    assert environment()["commit"] == head
    assert environment()["code_tree"] == git("rev-parse", "HEAD:package")
    module.write_text("2\n")
    assert environment()["commit"] == head + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"] is None  # no git


def test_code_without_a_repository_is_named_by_its_content(tmp_path):
    """As it was for the records of the frontier's first verdict, which name no commit."""
    checkout, copy = tmp_path / "checkout", tmp_path / "copy"
    package = checkout / "package"
    for name, text in {"a.py": "1\n", "a/b.py": "2\n", "a-b.py": "3\n", "run": "4\n"}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (package / "run").chmod(0o755)
    (package / "link").symlink_to("nowhere")
    (package / "left_over" / "__pycache__").mkdir(parents=True)
    (package / "left_over" / "__pycache__" / "x.pyc").write_text("")
    (checkout / ".gitignore").write_text("__pycache__\n")
    shutil.copytree(package, copy, symlinks=True)

    def git(*arguments):
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("add", ".")
    assert records.code_tree(copy) == git("write-tree", "--prefix=package/")
    (copy / "a" / "b.py").write_text("changed\n")
    assert records.code_tree(copy) != git("write-tree", "--prefix=package/")


def test_committed_results_name_their_code():
    """From the day on which `code_tree` joined; some older results name no commit."""
    for path in (Path(__file__).parents[2] / "data" / "results").rglob("*.json"):
        result = json.loads(path.read_text())
        recorded = result.get("environment", {}) if isinstance(result, dict) else {}
        if recorded.get("date", "") > "2026-11-22T19:30":
            assert recorded["code_tree"] and recorded["packages"]["sage_unsloth"], path


def test_environment_imports_no_torch():
    code = "import sys; from sage_unsloth.runs.record import environment; environment(); "
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    root = Path(__file__).parents[2]
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=root)
    assert output.split() == ["False", "False"]


def test_open_run_makes_the_folder_and_resumes(tmp_path, caplog):
    settings = {"steps": 10, "betas": (0.9, 0.99), "threshold": float("nan"), 7: "seven"}
    folder = open_run(tmp_path / "deep" / "run", settings)
    before = (folder / "run.json").read_bytes()
    record = json.loads(before)
    assert record["settings"]["betas"] == [0.9, 0.99]
    assert set(record) == {"settings", "environment"}
    append_jsonl(folder / "samples.jsonl", ROWS)
    assert open_run(str(folder), settings) == folder
    assert (folder / "run.json").read_bytes() == before
    assert not caplog.records


def test_open_run_names_each_setting_that_differs(tmp_path):
    open_run(tmp_path, {"steps": 10, "lr": 0.1, "same": 1, "guide": {"beta": 1}, "old": None})
    with pytest.raises(ValueError, match="Choose another --out, or delete the folder") as error:
        open_run(tmp_path, {"steps": 20, "lr": "0.1", "same": 1, "guide": {"beta": 2}, "new": 3})
    for text in (
        "steps was 10 and is 20",
        'lr was 0.1 and is "0.1"',
        "guide.beta was 1 and is 2",
        "old was null and is absent",
        "new was absent and is 3",
        str(tmp_path),
    ):
        assert text in str(error.value)
    assert "same" not in str(error.value)


def test_open_run_warns_of_other_versions(tmp_path, caplog):
    open_run(tmp_path, {})
    record = json.loads((tmp_path / "run.json").read_text())
    record["environment"]["packages"]["trl"] = "0.0.1"
    record["environment"]["date"] = "long ago"
    write_json(tmp_path / "run.json", record)
    with caplog.at_level(logging.WARNING):
        open_run(tmp_path, {})
    assert len(caplog.records) == 1
    assert 'trl was "0.0.1" and is' in caplog.text


def test_open_run_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds 'thesis\.tex' and no run\.json. Choose another"):
        open_run(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_open_run_forgives_a_kill_while_it_wrote(tmp_path):
    (tmp_path / ".run.json.123.tmp").write_text('{"sett')
    assert open_run(tmp_path, {"a": 1}) == tmp_path


def holder(target):
    """Another process that holds `target` until it is ended."""
    code = (
        "from sage_unsloth.runs.locks import exclusive_lock as lock\n"
        f"with lock({str(target)!r}): print('held', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_the_end_of_the_first_frees(tmp_path):
    target = tmp_path / "new" / "run"
    process = holder(target)
    for _ in range(2):  # a refused one does not erase the holder's name
        started = time.monotonic()
        with (
            pytest.raises(
                HeldError, match=rf"write to .*new/run, and process {process.pid} on .*Wait for"
            ),
            exclusive_lock(target),
        ):
            pytest.fail("two processes hold it")
        assert time.monotonic() - started < 1, "it must not wait"
    process.kill()  # without any chance to tidy up
    process.communicate()
    with exclusive_lock(target):
        pass
    with exclusive_lock(target):  # and again, for a plain end frees too
        assert not target.exists()


def test_a_lock_file_without_a_lock_means_nothing(tmp_path):
    """As a killed process leaves it; the next holder's name replaces the longer one of the last."""
    file = tmp_path / ".run.lock"
    file.write_text("process 1 on a host with a long name, of another version\n" * 3)
    with exclusive_lock(tmp_path / "run"):
        assert re.fullmatch(rf"process {os.getpid()} on \S+\n", file.read_text())
    assert file.exists()


def test_the_holders_of_older_versions_are_respected(tmp_path):
    """They took the same lock of the system on the same file, by themselves."""
    with (tmp_path / ".run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (
            pytest.raises(HeldError, match="another process does"),
            exclusive_lock(tmp_path / "run"),
        ):
            pytest.fail("two processes hold it")
    with exclusive_lock(tmp_path / "run"):
        pass


def test_children_of_a_holder_do_not_hold(tmp_path):
    """A process that it started, or forked off, may outlive it."""
    with exclusive_lock(tmp_path / "run"):
        started = subprocess.Popen(["sleep", "60"], close_fds=False)
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with exclusive_lock(tmp_path / "run"):
            pass
    finally:
        started.kill()
        started.wait()
        os.kill(forked, 9)
        os.waitpid(forked, 0)


def test_a_lock_is_on_one_path(tmp_path):
    with exclusive_lock(tmp_path / "a"), exclusive_lock(tmp_path / "b"):
        with (
            pytest.raises(ValueError, match="one process at a time"),
            exclusive_lock(tmp_path / "x" / ".." / "a"),
        ):
            pass
        assert sorted(path.name for path in tmp_path.iterdir()) == [".a.lock", ".b.lock"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_logged(tmp_path, monkeypatch, caplog, number):
    def flock(*_):
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.EIO:
        with pytest.raises(OSError, match="no"), exclusive_lock(tmp_path / "a"):
            pass
    else:
        for _ in range(2):  # what the first one left, killed or not, does not lock out the next
            with exclusive_lock(tmp_path / "a"):
                assert r"does not support locks. Start no second process" in caplog.text
                (tmp_path / ".a.lock").touch()


def test_a_disk_that_fills_up_keeps_every_row_before(tmp_path):
    """A limit on the size of a file stands for the full disk: the same OSError, from the same
    write.
    """
    path = tmp_path / "metrics.jsonl"
    code = (
        "import resource, sys\nfrom sage_unsloth.runs.files import append_jsonl\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "for step in range(100):\n    append_jsonl(sys.argv[1], [{'step': step, 'text': 'x' * "
        "100}])\n    print(step)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "OSError" in done.stderr
    written = int(done.stdout.split()[-1])
    assert [row["step"] for row in read_jsonl(path)] == list(range(written + 1))
    append_jsonl(path, [{"step": -1}])  # after space was made
    assert [row["step"] for row in read_jsonl(path)] == [*range(written + 1), -1]


def test_nothing_is_left_to_train_after_the_last_step(tmp_path):
    assert not is_last(None)
    for step, last in ((2, False), (3, True), (4, True)):
        write_json(tmp_path / "trainer_state.json", {"global_step": step, "max_steps": 3})
        assert is_last(tmp_path) is last
