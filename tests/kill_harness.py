"""Kills real runs at random moments, starts them again until they are done, and compares what they
leave with a run that was left alone.

    python tests/kill_harness.py --moments 50 --out runs/kills

Each command runs at smoke size. A moment is a random share of the processor time that the whole
command takes, so that it falls anywhere in it: imports, steps, checkpoints, sampling, the report.
The signal is SIGKILL, SIGTERM or SIGINT, and one life of a command is killed again and again until
a start outruns its moment. After each kill every JSON file must be readable, no process may be
left, and no more than the checkpoints' cadence may be lost. At the end: the same files, the same
rows (times aside), none twice, the same weights bit for bit.

By default each start is `python -m sage_unsloth COMMAND`. Where processor time is dear, `--fresh
0.3` starts only that share so; the others are forks of a process that has imported everything, and
run the same `main`. The same command resumes where it was stopped.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import psutil

from sage_unsloth.runs.files import append_jsonl, read_jsonl, write_json
from sage_unsloth.runs.record import environment

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
SAVE_STEPS = {"sft": 1, "train": 2, "quickstart": 1, "study": 1}  # of the commands below
PATIENCE = 900.0  # seconds for a process to end after SIGTERM or SIGINT, on a busy machine
LATER = (
    "environment",
    "seconds",
    "seconds_this_time",
    "step_time",
)  # what two equal runs differ in


def arguments(command: str, place: Path) -> list[str]:
    """A command at smoke size, without its --out; `place/whole` has what it starts from."""
    sft, trained = place / "whole" / "sft", place / "whole" / "train" / "adapter"
    return {
        "sft": [
            "sft",
            "--model",
            "arithmetic-base",
            "--smoke",
            "--held-out",
            "2",
            "--set",
            "max_steps=3",
        ],
        "train": [
            "train",
            "--algorithm",
            "sage-token",
            "--from",
            str(sft),
            "--smoke",
            "--set",
            "max_steps=4",
            "save_steps=2",
            "preflight_prompts=2",
        ],
        "evaluate": [
            "evaluate",
            "--models",
            f"sft={sft}/model",
            f"token={sft}/model+{trained}",
            "--benchmarks",
            "arithmetic",
            "--problems",
            "3",
            "--n",
            "4",
            "--batch",
            "3",
            "--max-tokens",
            "32",
        ],
        "quickstart": ["quickstart", "--smoke"],
        "study": [
            "study",
            "--task",
            "arithmetic",
            "--smoke",
            "--methods",
            "grpo=0.05",
            "sage-branch=0.05",
            "--seeds",
            "1",
        ],
    }[command]


NEEDS = {"train": ("sft",), "evaluate": ("sft", "train")}


class Process:
    """A command in a process of its own, started from nothing or as a fork of this one."""

    def __init__(self, words: list[str], log: Path, fresh: bool) -> None:
        with log.open("ab") as file:
            if fresh:
                command = [sys.executable, "-m", "sage_unsloth", *words]
                self.child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
                self.pid = self.child.pid
            else:
                self.child, self.pid = None, _fork(words, file.fileno())
        self.process = psutil.Process(self.pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self.child is not None:
            self.returncode = self.child.poll()
        elif self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """The exit code, or None if it has not ended by then."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.returncode

    def processor_seconds(self) -> float:
        """Of the process and its children, of which some work for it (`study`)."""
        try:
            times = self.process.cpu_times()
            used = times.user + times.system + times.children_user + times.children_system
            children = self.process.children()
        except psutil.Error:
            return float("inf")
        for child in children:
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                used += times.user + times.system
        return used


def _fork(words: list[str], log: int) -> int:
    from sage_unsloth.__main__ import main

    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the other threads are idle
        pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (for the life of the process)
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        code = main(words)
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def import_everything() -> None:
    """What a fork then has; the order is the commands' own."""
    from sage_unsloth import quickstart  # noqa: F401
    from sage_unsloth.trainers.loading import load_unsloth

    load_unsloth()


def contents(folder: Path) -> dict[str, object]:
    """What a run left: relative path -> rows, data, or a digest of the bytes; times and the
    folder's own name left out.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.relative_to(folder).parts[0] == "processes":
            continue  # logs of the processes of a call that was killed, and what they compile
        if path.name.endswith(".replaced.jsonl"):
            continue  # rows of steps that a kill took back
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl":
            found[name] = sorted(_text(row, folder) for row in read_jsonl(path))
        elif path.suffix == ".md":
            found[name] = path.read_text().replace(str(folder), "OUT")
        elif path.suffix == ".json":
            found[name] = _text(json.loads(path.read_text()), folder)
        elif path.suffix == ".png" or path.name.endswith(".lock"):
            found[name] = "there"
        elif path.suffix == ".csv" and path.name.startswith("training"):
            with path.open(newline="") as file:
                found[name] = [_text(row, folder) for row in csv.DictReader(file)]
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _text(value: object, folder: Path) -> str:
    def strip(value):
        if isinstance(value, dict):
            # PEFT writes a set, whose order is another one in each process.
            value = {k: sorted(v) if k == "target_modules" else v for k, v in value.items()}
            return {k: strip(v) for k, v in value.items() if k not in LATER}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return json.dumps(strip(value), sort_keys=True).replace(str(folder), "OUT")


def duplicates(folder: Path) -> list[str]:
    """Rows that are there twice: a record by problem and sample, a step of the metrics, a sampled
    completion.
    """
    found = []
    for path in folder.rglob("*.jsonl"):
        if path.name.endswith(".replaced.jsonl"):
            continue  # one kill after another may take back the same step
        rows = read_jsonl(path)
        if path.name == "completions.jsonl":
            keys = Counter(row["step"] for row in rows)
            each = min(keys.values(), default=0)
            found += [f"{path}: step {step}" for step, count in keys.items() if count != each]
        else:
            keys = Counter(
                row["step"] if "step" in row else (row["problem_id"], row["sample"]) for row in rows
            )
            found += [f"{path}: {key}" for key, count in keys.items() if count > 1]
    return found


def unreadable(folder: Path, cut: bool) -> list[str]:
    """JSON files that do not read; `cut`: whether the last line of a .jsonl may be cut short."""
    found = []
    for path in folder.rglob("*.json*"):
        if path.suffix not in (".json", ".jsonl") or path.parts[-2].startswith("checkpoint-"):
            continue  # a checkpoint that is cut short is passed over as a whole
        if any(part.endswith(".partial") for part in path.parts):
            continue  # becomes the folder without it when it is complete
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            else:
                read_jsonl(path)
                if not cut and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
                    found.append(f"{path}: the last line is cut")
        except ValueError as error:
            found.append(f"{path}: {error}")
    return found


def steps_lost(folder: Path) -> int:
    """Optimizer steps that are trained again: rows of metrics after the newest complete checkpoint;
    the most of all stages below.
    """
    from sage_unsloth.runs.checkpoints import checkpoint_step, last_checkpoint
    from sage_unsloth.training.stage import read_metrics

    lost = [0]
    for metrics in folder.rglob("metrics.jsonl"):
        run = metrics.parent
        if (run / "adapter").exists():
            continue
        newest = last_checkpoint(run / "checkpoints")
        rows = read_metrics(run)
        lost.append((rows[-1]["step"] if rows else 0) - (checkpoint_step(newest) if newest else 0))
    return max(lost)


def kill(process: Process, signum: int, at: float) -> bool:
    """Sends the signal once the process has used `at` seconds of processor time; False if it ended
    before.
    """
    while process.processor_seconds() < at:
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    if process.poll() is not None:
        return False
    os.kill(process.pid, signum)
    return True


def left_running(place: Path) -> list[str]:
    """Processes that work in the harness's folder, other than the harness, once they have had a
    minute to end.
    """
    deadline = time.monotonic() + 60
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.cwd() == str(place):
                    found.append(" ".join(process.cmdline())[:100])
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def whole(command: str, place: Path, fresh: bool) -> dict[str, float]:
    """The run that is left alone; its processor time, from nothing and as a fork, spreads the
    moments.
    """
    kind = "fresh" if fresh else "fork"
    file = place / f"whole-{command}-{kind}.json"
    if file.exists():
        return json.loads(file.read_text())
    for need in NEEDS.get(command, ()):
        if not any(place.glob(f"whole-{need}-*.json")):
            whole(need, place, fresh)
    done = place / "whole" / command
    out = place / f"again-{command}" if any(place.glob(f"whole-{command}-*.json")) else done
    shutil.rmtree(out, ignore_errors=True)  # of a harness that was stopped
    out.parent.mkdir(exist_ok=True)
    process = Process([*arguments(command, place), "--out", str(out)], place / "log.txt", fresh)
    used = 0.0
    while process.poll() is None:
        now = process.processor_seconds()
        used = now if now < float("inf") else used
        time.sleep(0.05)
    if process.returncode != 0:
        raise SystemExit(f"{command} must run through when it is left alone; see {place}/log.txt")
    if out != done and contents(out) != contents(done):
        raise SystemExit(f"two runs that are left alone must be equal; {out} and {done} differ")
    write_json(file, {"seconds": used})
    return {"seconds": used}


def life(
    command: str,
    place: Path,
    number: int,
    moments: int,
    fresh: float,
    seed: int,
    bar: object = None,
) -> dict:
    """One folder: killed at up to `moments` moments, started again until it is done, and compared.

    Returns:
        The moments, and what was wrong (nothing, one hopes).
    """
    draw = random.Random(f"{seed} {command} {number}")
    folder = place / "lives" / f"{command}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    log = place / "lives" / f"{command}-{number}.log"
    log.unlink(missing_ok=True)
    words = [*arguments(command, place), "--out", str(folder)]
    kills, wrong, starts, lost = [], [], 0, 0
    while True:
        anew = draw.random() < fresh
        signum, share = draw.choice(SIGNALS), draw.random()
        at = share * whole(command, place, anew)["seconds"]
        process = Process(words, log, anew)
        starts += 1
        if len(kills) == moments or not kill(process, signum, at):
            code = process.wait(4 * PATIENCE)
            if code != 0:
                wrong.append(f"start {starts} must end with 0; it ended with {code}")
            break
        code = process.wait()
        if code == 0:
            break  # the signal came when all was done; what is there is compared like any other end
        name = signal.Signals(signum).name
        kills.append(
            {
                "signal": name,
                "start": "fresh" if anew else "fork",
                "processor_seconds": round(at, 2),
                "exit": code,
            }
        )
        if code is None:
            wrong.append(
                f"{name} at {at:.2f} s must end the process; it did not within {PATIENCE:g} s"
            )
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        # Before and after `main` a signal ends the process in Python's own way.
        expected = {"SIGKILL": (-9,), "SIGTERM": (143, -15), "SIGINT": (130, -2)}[name]
        if code not in (None, *expected):
            wrong.append(f"{name} at {at:.2f} s must exit with {expected}; it did with {code}")
        wrong += [f"left running after {name}: {text}" for text in left_running(place)]
        if folder.exists():
            wrong += unreadable(folder, cut=name == "SIGKILL")
            kills[-1]["steps_lost"] = steps_lost(folder)
            # What a SIGKILL before it lost is still to be trained again, where this one came before
            # that.
            allowed = SAVE_STEPS.get(command, 0) if name == "SIGKILL" else lost
            lost = kills[-1]["steps_lost"]
            if kills[-1]["steps_lost"] > allowed:
                wrong.append(
                    f"{name} at {at:.2f} s may lose {allowed} steps; it lost "
                    f"{kills[-1]['steps_lost']}"
                )
        if bar is not None:
            bar.update()
    if folder.exists() and not wrong:
        wrong += [f"there twice: {text}" for text in duplicates(folder)]
        found, expected = contents(folder), contents(place / "whole" / command)
        wrong += [f"only after kills: {name}" for name in found.keys() - expected.keys()]
        wrong += [f"only without kills: {name}" for name in expected.keys() - found.keys()]
        wrong += [
            f"differs: {name}"
            for name in found.keys() & expected.keys()
            if found[name] != expected[name]
        ]
    if not wrong:
        shutil.rmtree(folder)
    return {"command": command, "number": number, "kills": kills, "starts": starts, "wrong": wrong}


def summary(lives: list[dict]) -> dict:
    """Counts by command and signal, and everything that was wrong."""
    table: dict[str, Counter] = {}
    for row in lives:
        counts = table.setdefault(row["command"], Counter())
        counts["lives"] += 1
        counts["starts"] += row["starts"]
        for one in row["kills"]:
            counts[one["signal"]] += 1
            counts[f"started {one['start']}"] += 1
            counts["steps trained again"] += one.get("steps_lost", 0)
    return {
        "moments": sum(len(row["kills"]) for row in lives),
        "commands": {name: dict(sorted(counts.items())) for name, counts in table.items()},
        "wrong": [
            f"{row['command']}-{row['number']}: {text}" for row in lives for text in row["wrong"]
        ],
    }


COMPARED = (
    "after each kill: exit code; no process left; every JSON and JSONL file readable; optimizer "
    "steps lost (none after SIGTERM and "
    "SIGINT, at most save_steps after SIGKILL)",
    "at the end, with the run that was left alone: the set of files; rows of every JSONL file "
    "without their times, none twice; every "
    "JSON file without environment and times; CSV tables without times; weights, adapters and "
    "tokenizers byte by byte",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the harness's own")
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument(
        "--each", type=int, default=4, help="moments of one life, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--commands", nargs="+", default=["sft", "train", "evaluate", "study", "quickstart"]
    )
    parser.add_argument(
        "--fresh",
        type=float,
        default=1.0,
        help="share of the starts from nothing (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="begin no further life after so many")
    parser.add_argument("--result", type=Path, help="also write the summary to this file")
    options = parser.parse_args()
    from tqdm.auto import tqdm

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    place = options.out.resolve()
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if options.fresh < 1:
        import_everything()
    journal, begun = place / "lives.jsonl", time.monotonic()
    lives = read_jsonl(journal) if journal.exists() else []
    done = sum(len(row["kills"]) for row in lives)
    with tqdm(total=options.moments, initial=done, desc="kills", unit="moment") as bar:
        number = 1 + max((row["number"] for row in lives), default=-1)
        while done < options.moments:
            if options.minutes is not None and time.monotonic() - begun > 60 * options.minutes:
                break
            command = options.commands[number % len(options.commands)]
            bar.set_postfix_str(command)
            row = life(
                command,
                place,
                number,
                min(options.each, options.moments - done),
                options.fresh,
                options.seed,
                bar,
            )
            append_jsonl(journal, [row])
            lives.append(row)
            done += len(row["kills"])
            number += 1
    result = summary(lives)
    report = {"asked": {"moments": options.moments, "fresh": options.fresh, "seed": options.seed}}
    report |= result | {"compared": COMPARED, "lives": lives, "environment": environment()}
    write_json(place / "kills.json", report)
    if options.result is not None:
        write_json(options.result, report)
    print(json.dumps(result, indent=2))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
