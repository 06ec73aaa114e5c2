"""Mutation testing of a room, or of one file, by mutmut: which changes do its tests notice?

    python -m research.mutation objective --sample 40 --out data/results/reliability/mutation
    python -m research.mutation objective/loss.py --tests tests/objective/test_losses.py

mutmut changes one expression at a time (an operator, a number, an argument left out) in a copy of
the repository and runs those tests of the room that reach it. A sample of the mutants is tried,
the same for the same seed; those that no test notices are listed with their change, and `judged`
says of each what it is, by one of `JUDGEMENTS`. A second call keeps these words.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from research.data import DATA
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.record import environment

ROOT = DATA.parent
NO_TEST, NOTICED, SURVIVED = "no test reaches it", "noticed", "survived"
OUTCOMES: dict[int | None, str] = {0: SURVIVED, 5: SURVIVED, 33: NO_TEST}
"""Of mutmut's exit codes; any other is a test that failed, died or hung."""
JUDGEMENTS = {
    "equivalent": "the same program; the reason follows",
    "wording": "changes the words of an error or a log line alone",
    "other test": "one that the sample left out notices it, of this name",
    "test added": "one of this name was written for it, and fails under it",
    "test missing": "what a user would get",
}
SETTINGS = """
[tool.mutmut]
source_paths = ["sage_unsloth"]
only_mutate = ["sage_unsloth/{files}"]
also_copy = ["research", "data", "docs", "notebooks", "tests"]
pytest_add_cli_args = [
    "-q", "-p", "no:cacheprovider", "-p", "research.mutation", "-m", "not long",
    "-k", "not a_run_reads_loads_and_checks_once", # it counts calls by names, which mutmut changes
    "-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true",
]
pytest_add_cli_args_test_selection = {tests}
use_git_change_detection = false
timeout_constant = 10.0
timeout_multiplier = 4.0
"""


def mutate(
    room: str, tests: Sequence[str], sample: int, seed: int, processes: int
) -> dict[str, Any]:
    """The outcomes of a sample of the room's mutants, and the changes of those that survived."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy(copy)
        settings = copy / "pyproject.toml"
        own = settings.read_text(encoding="utf-8")
        run = [sys.executable, "-m", "mutmut", "run", "--max-children", str(processes)]
        # It has no command that makes mutants alone: with tests that do not exist it ends there.
        settings.write_text(own + _settings(room, ["none"]), encoding="utf-8")
        subprocess.run([*run, "none"], cwd=copy, check=False, capture_output=True)
        settings.write_text(own + _settings(room, tests), encoding="utf-8")
        names = sorted(name for name, _ in _outcomes(copy, room))
        chosen = random.Random(seed).sample(names, min(sample, len(names)))
        subprocess.run([*run, *chosen], cwd=copy, check=True)
        result = {name: code for name, code in _outcomes(copy, room) if name in chosen}
        outcomes = {name: OUTCOMES.get(code, NOTICED) for name, code in result.items()}
        survivors = {
            name: {"outcome": outcome, "change": _change(copy, name), "judged": ""}
            for name, outcome in outcomes.items()
            if outcome != NOTICED
        }
    noticed = len(outcomes) - len(survivors)
    return {
        "room": room,
        "tests": list(tests),
        "seed": seed,
        "mutants": len(names),
        "tried": len(outcomes),
        "noticed": noticed,
        "survivors": survivors,
        "environment": environment(),
    }


def score(result: dict[str, Any]) -> tuple[int, int, int]:
    """How many mutants are another program, and how many of these the tests noticed when the sample
    was drawn, and notice now.
    """
    words = Counter(row["judged"].partition(":")[0] for row in result["survivors"].values())
    counted = result["tried"] - words["equivalent"] - words["wording"]
    before = result["noticed"] + words["other test"]
    return counted, before, before + words["test added"]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """This module is also a plugin of pytest: files whose tests take less time come first."""
    stats = Path("mutmut-stats.json")
    if not stats.is_file():
        return
    seconds: Counter[str] = Counter()
    for test, duration in read_json(stats)["duration_by_test"].items():
        seconds[test.partition("::")[0]] += duration
    items.sort(key=lambda item: seconds[item.nodeid.partition("::")[0]])


pytest_collection_modifyitems.pytest_impl = {"trylast": True}


def _settings(room: str, tests: Sequence[str]) -> str:
    return SETTINGS.format(files=_pattern(room), tests=json.dumps(list(tests)))


def _pattern(room: str) -> str:
    """Of the files below the package."""
    return room if room.endswith(".py") else f"{room}/*.py"


def _copy(copy: Path) -> None:
    """The repository's files as they are, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())


def _outcomes(copy: Path, room: str) -> Iterator[tuple[str, int | None]]:
    for file in (copy / "mutants" / "sage_unsloth").glob(f"{_pattern(room)}.meta"):
        yield from read_json(file)["exit_code_by_key"].items()


def _change(copy: Path, name: str) -> str:
    show = [sys.executable, "-m", "mutmut", "show", name]
    text = subprocess.run(show, cwd=copy, capture_output=True, text=True, check=True).stdout
    lines = text.splitlines()
    return "\n".join(x for x in lines if x[:1] in ("+", "-") and x[:3] not in ("+++", "---"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", help="a folder of the package, or a file of it")
    parser.add_argument(
        "--tests", nargs="+", help="default: the folder of the room in tests/, or its file"
    )
    parser.add_argument("--sample", type=int, default=40, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("-n", type=int, default=1, help="at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/mutation"))
    options = parser.parse_args()
    name = options.room.split("/")[0]
    usual = f"tests/{name}" if (ROOT / "tests" / name).is_dir() else f"tests/test_{name}.py"
    tests = options.tests or [usual]
    result = mutate(options.room, tests, options.sample, options.seed, options.n)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{options.room.removesuffix('.py').replace('/', '_')}.json"
    known = read_json(file)["survivors"] if file.is_file() else {}
    for name, row in result["survivors"].items():
        if name in known and known[name]["change"] == row["change"]:
            row["judged"] = known[name]["judged"]
    write_json(file, result)
    print(f"{options.room}: {result['noticed']} of {result['tried']} mutants are noticed")
    for name, row in result["survivors"].items():
        print(f"{row['outcome']}: {name}\n{row['change']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
