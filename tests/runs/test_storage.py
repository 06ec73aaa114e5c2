"""What is on the disk: whole folders, complete checkpoints; disks that are full or damaged."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from table_engine import CONFIG, ROWS, Table

import sage_unsloth
from sage_unsloth.runs.checkpoints import NUM_CHECKPOINTS, SIZES, keep_newest, last_checkpoint
from sage_unsloth.runs.files import append_jsonl, read_json, read_jsonl, whole_folder, write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import open_run
from sage_unsloth.runs.storage import StorageError, check_room, disk_errors
from sage_unsloth.sampling.record_files import read_samples, settings_path
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.trainers.finite import NotFiniteError
from sage_unsloth.training.ledger import Ledger
from sage_unsloth.training.stage import common_arguments, read_metrics, run_trainer

PACKAGE = Path(sage_unsloth.__file__).parent


# --- Folders --------------------------------------------------------------------------------------


def test_a_folder_reaches_the_disk_before_its_name_and_the_name_after(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.rename

    def traced_sync(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path)))
        fsync(descriptor)

    def traced_rename(before, after):
        calls.append("rename")
        rename(before, after)

    monkeypatch.setattr(os, "fsync", traced_sync)
    monkeypatch.setattr(os, "rename", traced_rename)
    with whole_folder(tmp_path / "result") as partial:
        assert not partial.exists()
        (partial / "sub").mkdir(parents=True)
        (partial / "a").write_text("a")
        (partial / "sub" / "b").write_text("b")
        assert not (tmp_path / "result").exists()
    parts = {f"/result.partial{name}" for name in ("", "/a", "/sub", "/sub/b")}
    assert set(calls[:4]) == parts and calls[4:] == ["rename", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_result_have_the_users_permissions(tmp_path, umask, mode):
    """safetensors makes a file that its owner alone may read, and renames it."""
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "result") as partial:
            (partial / "sub").mkdir(parents=True)
            save_file({"weight": torch.ones(3)}, partial / "sub" / "model.safetensors")
            (partial / "config.json").write_text("{}")
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "result").rglob("*") if file.is_file()]
    assert [file.stat().st_mode & 0o777 for file in files] == [mode, mode]


def test_an_error_and_a_kill_leave_no_result(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "result") as partial:
        partial.mkdir()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    killed = (
        "import os, sys\nfrom sage_unsloth.runs.files import whole_folder\n"
        "with whole_folder(sys.argv[1]) as partial:\n    partial.mkdir()\n    (partial / "
        "'old').touch()\n    os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "result")], check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["result.partial"]
    with whole_folder(tmp_path / "result") as partial:
        partial.mkdir()
        (partial / "new").touch()
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["result", "result/new"]


def test_a_result_gives_way_to_a_whole_one_only(tmp_path):
    for text in ("one", "two"):
        with whole_folder(tmp_path / "result", replace=True) as partial:
            partial.mkdir()
            (partial / "a").write_text(text)
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "result", replace=True):
        1 / 0  # noqa: B018
    assert (tmp_path / "result" / "a").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_no_other_module_renames_and_none_reads_the_clock():
    """Results get their names in runs/files.py alone; no order is taken from wall clocks."""
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file != PACKAGE / "runs" / "files.py":
            found = re.findall(
                r"os\.(?:replace|rename)\(|\.rename\(|\.replace\(path"
                r"|shutil\.move\((?!file, folder)",
                text,
            )
            assert not found, f"{file.name}: {found}"
        assert not re.findall(r"time\.time\(|getmtime|st_[mc]time\b", text), file.name


# --- Checkpoints ----------------------------------------------------------------------------------


class Line(torch.nn.Module):
    """A model that transformers' own Trainer can train in no time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def line_trainer(folder, **settings):
    """transformers' own Trainer with the arguments and callbacks of both stages."""
    from transformers import Trainer, TrainingArguments

    arguments = common_arguments(folder, 1) | {
        "max_steps": 4,
        "seed": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.1,
        "optim": "adamw_torch",
    }
    rows = [{"x": torch.full((64,), i / 8)} for i in range(8)]
    return Trainer(Line(), TrainingArguments(**(arguments | settings)), train_dataset=rows)


def run_line(folder, resume=None, callback=None, **settings):
    trainer = line_trainer(folder, **settings)
    if callback is not None:
        trainer.add_callback(callback)
    run_trainer(trainer, folder, "line", resume=resume)
    return trainer.model.state_dict()


@pytest.fixture(scope="module")
def line_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    return folder, run_line(folder)


def steps(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def test_the_two_newest_are_kept_and_their_sizes_say_that_the_disk_has_them(line_run):
    checkpoints = line_run[0] / "checkpoints"
    assert steps(checkpoints) == [3, 4]
    sizes = read_json(checkpoints / "checkpoint-4" / SIZES)
    assert {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
    } <= sizes.keys()
    assert sizes == {
        f.name: f.stat().st_size
        for f in (checkpoints / "checkpoint-4").iterdir()
        if f.name != SIZES
    }


def cuts(size):
    return sorted({0, 1, size // 3, size // 2, size - 100, size - 2, size - 1} & set(range(size)))


@pytest.mark.parametrize("sealed", [True, False], ids=["complete", "killed before sizes.json"])
def test_a_checkpoint_cut_short_anywhere_is_passed_over(line_run, tmp_path, caplog, sealed):
    """Without sizes.json what resuming reads must be whole; the rest (training_args.bin) it does
    not read.
    """
    shutil.copytree(line_run[0] / "checkpoints", tmp_path, dirs_exist_ok=True)
    older, newest = tmp_path / "checkpoint-3", tmp_path / "checkpoint-4"
    names = [file.name for file in newest.iterdir() if file.name != SIZES]
    if not sealed:
        (newest / SIZES).unlink()
        names.remove("training_args.bin")
    assert last_checkpoint(tmp_path) == newest
    tried = 0
    for name in names:
        content = (newest / name).read_bytes()
        for cut in cuts(len(content)):
            if not sealed and name.endswith(".json") and not content[cut:].strip():
                continue  # only the line's end is gone
            (newest / name).write_bytes(content[:cut])
            caplog.clear()
            assert last_checkpoint(tmp_path) == older, f"{name} cut at {cut} of {len(content)}"
            assert f"{newest} is incomplete and is passed over: {name}" in caplog.text
            tried += 1
        (newest / name).unlink()
        assert last_checkpoint(tmp_path) == older, f"without {name}"
        (newest / name).write_bytes(content)
    assert tried > 30 and last_checkpoint(tmp_path) == newest


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": 3}', '{"weight_map": {"w": 3}}'])
def test_an_index_that_is_none_is_passed_over(line_run, tmp_path, index):
    shutil.copytree(line_run[0] / "checkpoints", tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-4" / "model.safetensors.index.json").write_text(index)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_an_archive_with_a_hole_is_passed_over(line_run, tmp_path):
    """After a power cut a file can have its length and zeros within it; PyTorch's archives carry
    checksums.
    """
    shutil.copytree(line_run[0] / "checkpoints", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "checkpoint-4" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    file.write_bytes(content)
    assert last_checkpoint(tmp_path).name == "checkpoint-3"


def test_a_disk_that_is_away_for_a_moment_is_no_damage(line_run, tmp_path, monkeypatch):
    """A checkpoint that cannot be read now may be whole: the run ends, and nothing is deleted."""
    shutil.copytree(line_run[0], tmp_path / "out")
    folder = tmp_path / "out" / "checkpoints"

    def away(*_):
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr("sage_unsloth.runs.checkpoints.zipfile.ZipFile", away)
    with pytest.raises(OSError, match="stale"):
        last_checkpoint(folder)
    assert steps(folder)


def test_the_run_goes_on_from_the_one_before_to_the_same_weights(line_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(line_run[0], folder)
    newest = folder / "checkpoints" / "checkpoint-4"
    (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:1000])
    leftover = folder / "checkpoints" / "checkpoint-9"
    leftover.mkdir()
    (leftover / "model.safetensors").touch()
    found = run_line(folder, resume=last_checkpoint(folder / "checkpoints"))
    assert all(torch.equal(found[name], line_run[1][name]) for name in found)
    assert steps(folder / "checkpoints") == [3, 4], "what was passed over is cleared away"
    assert last_checkpoint(folder / "checkpoints") == newest
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4]


def test_a_clock_that_jumps_changes_nothing(tmp_path):
    """transformers deletes by modification time: were it left to it, a clock set back would cost
    the newest checkpoint.
    """
    from transformers import TrainerCallback

    class Jumps(TrainerCallback):
        times = iter([4e9, 3e9, 1e9, 2e9])

        def on_step_end(self, args, state, control, **kwargs):
            now = next(self.times)
            for path in Path(args.output_dir).glob("checkpoint-*"):
                os.utime(path, (now + 1000 * state.global_step,) * 2)

    run_line(tmp_path, callback=Jumps())
    checkpoints = tmp_path / "checkpoints"
    assert steps(checkpoints) == [3, 4]
    for number, path in enumerate(sorted(checkpoints.iterdir(), reverse=True)):
        os.utime(path, (number * 1e9,) * 2)
    assert last_checkpoint(checkpoints).name == "checkpoint-4"


def test_none_is_deleted_before_the_new_one_is_complete(line_run, tmp_path, caplog):
    shutil.copytree(line_run[0] / "checkpoints", tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / SIZES).unlink()
    (tmp_path / "checkpoint-5" / "optimizer.pt").unlink()
    keep_newest(tmp_path, 5)
    assert steps(tmp_path) == [3, 4, 5] and "so none is deleted: optimizer.pt" in caplog.text
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-6")
    keep_newest(tmp_path, 6)
    assert steps(tmp_path) == [4, 6] and NUM_CHECKPOINTS == 2, "the incomplete one is not counted"


def test_the_disk_has_a_checkpoint_before_an_older_one_goes(line_run, tmp_path, monkeypatch):
    shutil.copytree(line_run[0] / "checkpoints", tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-5")
    synced, fsync = [], os.fsync

    def traced(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert steps(tmp_path) == [3, 4, 5]
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", traced)
    keep_newest(tmp_path, 5)
    expected = [*(tmp_path / "checkpoint-5").iterdir(), tmp_path / "checkpoint-5", tmp_path]
    assert {str(p) for p in expected if p.name != SIZES} <= set(synced)
    assert steps(tmp_path) == [4, 5]


# --- A disk that does not take it -----------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk, leave=0):
    with (
        pytest.raises(OSError, match="No space"),
        (disk / "filler").open("wb", buffering=0) as file,
    ):
        while True:
            file.write(bytes(4096))
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - leave)


def test_the_error_names_rule_value_and_remedy():
    with pytest.raises(StorageError) as raised, disk_errors(Path("run")):
        Path("/dev/full").write_text("x")
    assert raised.value.errno == errno.ENOSPC
    message = (
        r"the disk must have room .* run does not fit \(No space left on device\)\. Free "
        r"some space and run the same command"
    )
    assert re.search(message, str(raised.value))
    with pytest.raises(ZeroDivisionError), disk_errors(Path("run")):
        1 / 0  # noqa: B018
    with pytest.raises(FileNotFoundError), disk_errors(Path("run")):
        Path("/no/such/file").read_text()


@pytest.mark.parametrize("write", ["torch", "safetensors", "jsonl", "json"])
def test_a_full_disk_loses_nothing_and_says_so_whoever_writes(small_disk, write):
    def attempt(number):
        value = {"row": number, "text": "x" * 9000}
        with exclusive_lock(small_disk / "run"):
            if write == "jsonl":
                append_jsonl(small_disk / "rows.jsonl", [value])
            elif write == "json":
                write_json(small_disk / "a.json", value)
            else:
                with whole_folder(small_disk / "result", replace=True) as partial:
                    partial.mkdir()
                    tensors = {"w": torch.full((3000,), float(number))}
                    save = torch.save if write == "torch" else save_file
                    save(tensors, partial / "w")

    def found():
        if write == "jsonl":
            return [row["row"] for row in read_jsonl(small_disk / "rows.jsonl")]
        if write == "json":
            return read_json(small_disk / "a.json")["row"]
        load = torch.load if write == "torch" else load_file
        return load(small_disk / "result" / "w")["w"][0].item()

    attempt(1)
    fill(small_disk, leave=4096)
    with pytest.raises(StorageError, match=r"must have room .* Free some space and run the same"):
        attempt(2)
    assert found() == ([1] if write == "jsonl" else 1)
    names = {path.name for path in small_disk.iterdir()}
    assert names <= {"filler", ".run.lock", "rows.jsonl", "a.json", "result"}, "nothing half made"
    (small_disk / "filler").unlink()
    attempt(2)
    assert found() == ([1, 2] if write == "jsonl" else 2)


def test_training_on_a_full_disk_goes_on_once_there_is_room(small_disk, line_run):
    """The third checkpoint does not fit: the second one is whole, and the same run from it ends in
    the same weights.
    """
    from transformers import TrainerCallback

    class Fills(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                fill(small_disk, leave=24_000)

    folder = small_disk / "run"
    with pytest.raises(StorageError, match="must have room"), exclusive_lock(folder):
        run_line(folder, callback=Fills())
    assert last_checkpoint(folder / "checkpoints").name == "checkpoint-2"
    (small_disk / "filler").unlink()
    with exclusive_lock(folder):
        found = run_line(folder, resume=last_checkpoint(folder / "checkpoints"))
    assert all(torch.equal(found[name], line_run[1][name]) for name in found)
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4]


def test_drawing_on_a_full_disk_goes_on_where_it_was(small_disk, tmp_path):
    def draw(folder):
        return sample_and_grade(
            CONFIG,
            Table(text="<SOLUTION>{}</SOLUTION>" + " " * 600),
            ROWS,
            folder / "s.jsonl",
            model="base",
            benchmark="arithmetic",
        )

    fill(small_disk, leave=24_576)
    with pytest.raises(StorageError, match="must have room"):
        draw(small_disk)
    kept = (small_disk / "s.jsonl").read_bytes()
    rows = len(read_samples(small_disk / "s.jsonl"))
    assert 0 < rows < CONFIG.num_samples * len(ROWS)
    (small_disk / "filler").unlink()
    assert draw(small_disk) == draw(tmp_path)
    whole = kept[: kept.rfind(b"\n") + 1]
    assert (small_disk / "s.jsonl").read_bytes().startswith(whole), "nothing was drawn again"


def test_what_our_errors_quote_of_the_disk_hides_them_not():
    error = NotFiniteError(
        "the loss is nan; its batch could not be kept: No space left on device (os error 28)"
    )
    with pytest.raises(NotFiniteError, match="the loss is nan"), disk_errors(Path("run")):
        raise error
    with pytest.raises(StorageError, match="must have room"), disk_errors(Path("run")):
        raise RuntimeError("No space left on device (os error 28)")


def test_a_limit_on_file_sizes_is_said(tmp_path):
    code = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "from sage_unsloth.runs.files import append_jsonl; from sage_unsloth.runs.locks import "
        "exclusive_lock as lock\n"
        "with lock(sys.argv[1]):\n    append_jsonl(sys.argv[1], [{'x': 'y' * 3000}])\n    "
        "append_jsonl(sys.argv[1], [{'x': 'y' * 3000}])"
    )
    path = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert "StorageError" in done.stderr and "does not fit (File too large)" in done.stderr
    assert len(read_jsonl(path)) == 1


def test_a_read_only_disk_is_said(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with (
        pytest.raises(
            StorageError, match=r"allowed to .*refuses \(Read-only file system\)\. Change"
        ),
        exclusive_lock(small_disk / "run"),
    ):
        pass


def test_a_folder_without_permission_is_said(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:  # root may write everywhere
                os.setuid(65534)
            with exclusive_lock(closed / "run"):
                pass
        except StorageError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    assert r"(Permission denied). Change its permissions, or choose another --out" in said


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with (
            pytest.raises(StorageError, match=r"must be folders, .*file.* is not \(.*\)\. Move"),
            exclusive_lock(path),
        ):
            open_run(path, {})


# --- Files that were damaged ----------------------------------------------------------------------


@pytest.fixture
def record_set(tmp_path):
    path = tmp_path / "s.jsonl"
    draw_set(path)
    return path


def draw_set(path):
    engine = Table()
    rows = sample_and_grade(CONFIG, engine, ROWS, path, model="base", benchmark="arithmetic")
    return rows, engine.drawn.total()


def by_problem(records):
    """Records as a draw returns them, whichever order they were drawn in."""
    found = {(record["problem_id"], record["sample"]): record for record in records}
    return [found[row["id"], sample] for row in ROWS for sample in range(CONFIG.num_samples)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda lines: [*lines[:2], lines[2][:40] + b"\xff\x00" + lines[2][42:], *lines[3:]],
            "in line 3 of",
        ),
        (lambda lines: [*lines[:2], bytes(200) + b"\n", *lines[3:]], r"got b'\\x00.* in line 3 of"),
        (lambda lines: [*lines[:2], lines[2][:50] + lines[3], *lines[4:]], "in line 3 of"),
        (
            lambda lines: [
                *lines[:2],
                re.sub(rb'"run": "\w+"', b'"run": "other"', lines[2]),
                *lines[3:],
            ],
            "of one set, .*, but line 3 of .* is one of 'other', .* Delete that line",
        ),
        (lambda lines: [b'{"step": 1}\n', *lines], "line 1 of .* is one of None, with .'step'"),
        (
            lambda lines: [re.sub(rb'"run": "\w+"', b'"run": "other"', line) for line in lines],
            r"they are of 'other'. Put back",
        ),
    ],
    ids=[
        "bytes in a line",
        "a line of zeros",
        "two lines grown together",
        "of another set",
        "of another kind",
        "a swapped file",
    ],
)
def test_a_damaged_line_is_named(record_set, damage, message):
    lines = record_set.read_bytes().splitlines(keepends=True)
    record_set.write_bytes(b"".join(damage(lines)))
    before = record_set.read_bytes()
    with pytest.raises(ValueError, match=message):
        draw_set(record_set)
    assert record_set.read_bytes() == before


@pytest.mark.parametrize(
    "tail",
    [
        lambda line: line[:-20],
        lambda line: line[:-1],
        lambda line: bytes(len(line)),
        lambda line: line[:30] + bytes(300),
    ],
    ids=["cut", "without its end", "zeros after a power cut", "cut and zeros"],
)
def test_a_damaged_end_is_drawn_again_alone(record_set, tail):
    *lines, last = record_set.read_bytes().splitlines(keepends=True)
    whole = read_samples(record_set)
    record_set.write_bytes(b"".join([*lines, tail(last)]))
    rows, drawn = draw_set(record_set)
    assert read_samples(record_set) == whole
    assert rows == by_problem(whole) and drawn == (0 if tail(last) == last[:-1] else 1)


def test_a_line_that_is_there_twice_counts_once(record_set):
    lines = record_set.read_bytes().splitlines(keepends=True)
    whole = read_samples(record_set)
    record_set.write_bytes(b"".join([*lines, lines[0], lines[-1]]))
    rows, drawn = draw_set(record_set)
    assert read_samples(record_set) == whole
    assert rows == by_problem(whole) and drawn == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", bytes(100)])
def test_settings_that_are_damaged_are_named(record_set, content, tmp_path):
    settings_path(record_set).write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"s\.settings\.json must hold one JSON object, but it .*Put back a copy, or choose",
    ):
        draw_set(record_set)
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.json must hold one JSON object"):
        open_run(run, {})
    with pytest.raises(ValueError, match=r"run\.json must hold one JSON object"):
        Ledger(run, "sft").begin({}, CONFIG, "model")


def test_the_records_of_a_killed_power_supply_are_json(record_set):
    """No prefix of the file reads as other rows than the whole lines in it."""
    content = record_set.read_bytes()
    expected = [json.loads(line) for line in content.splitlines()]
    for cut in range(0, len(content), 97):
        record_set.write_bytes(content[:cut])
        found = read_jsonl(record_set)
        assert found == expected[: len(found)] and len(found) >= content[:cut].count(b"\n")


def test_what_will_not_fit_is_refused_before_it_is_written(tmp_path, monkeypatch):
    run = tmp_path / "new" / "run"
    free = shutil.disk_usage(tmp_path).free
    check_room(run, free // 2)
    with pytest.raises(StorageError, match=r"are free. Free some space") as error:
        check_room(run, 3 * free)
    assert str(run) in str(error.value) and error.value.errno == errno.ENOSPC
    usage = shutil.disk_usage(tmp_path)._replace(free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    run.mkdir(parents=True)
    (run / "checkpoint").write_bytes(b"x" * 600)
    check_room(run, 1100)  # 600 of which are there
    with pytest.raises(StorageError):
        check_room(run, 1101)
