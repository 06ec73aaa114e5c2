"""Does the patch hold on other versions of Python and PyTorch?

    python tests/python_matrix.py --cache FOLDER

For each row uv makes an environment of that Python and that PyTorch with the pinned packages, in a
folder of the cache; there the contract is checked and `TESTS` run. Interpreters are those that uv
finds on this machine. The result is `data/results/reliability/pythons.json`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import version_matrix
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "data" / "results" / "reliability" / "pythons.json"
ROWS = {
    "as on Colab": ("3.13", "2.11.0"),
    "3.13, the newest torch": ("3.13", "2.14.1"),
}
"""Name -> Python and torch."""
TESTS = [
    *version_matrix.TESTS,
    "tests/grading/test_hostile.py::test_a_worker_has_none_of_its_callers_secrets",
    "tests/grading/test_hostile.py::test_root_without_a_namespace_cannot_read_its_callers_environment",
    "tests/training/test_rlvr.py::test_killed_run_goes_on_to_the_same_weights",
]
VERSION = 'import platform; print("PYTHON " + platform.python_version())\n'


def make_environment(python: str, torch: str, cache: Path) -> Path:
    """The interpreter of an environment, made if it is not in the cache."""
    folder = cache / f"python{python}-torch{torch}"
    inside = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run(["uv", "venv", "--clear", "--python", python, str(folder)], check=True)
        command = ["uv", "pip", "install", "--python", str(inside), "-r", "pyproject.toml"]
        subprocess.run([*command, "--extra", "dev", f"torch=={torch}"], cwd=ROOT, check=True)
        (folder / "complete").touch()
    return inside


def try_python(name: str, python: Path, cache: Path, tests: list[str]) -> dict:
    """One row: what the contract says in an environment, and then how many tests pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(cache / f"compiled-{python.parents[1].name}"),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            [python, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    said = run("-c", VERSION + version_matrix.CONTRACT % (version_matrix.PACKAGES,))
    found = re.search(r"^REPORT (.*)$", said, re.MULTILINE)
    version = re.search(r"^PYTHON (.*)$", said, re.MULTILINE)
    row = {"name": name, "python": version[1] if version else None, "passed": 0, "failed": 0}
    if found is None:
        return row | {"versions": {}, "outcome": "FAILS", "message": said[-2_000:]}
    row |= json.loads(found[1])
    if row["outcome"] == "holds":
        said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
        for count, word in re.findall(r"(\d+) (passed|failed|error)", said.splitlines()[-1]):
            row["passed" if word == "passed" else "failed"] += int(count)
        if row["failed"] or not row["passed"]:
            row |= {"outcome": "FAILS", "message": said[-2_000:]}
    row["message"] = row["message"].replace(str(cache), "CACHE").replace(str(ROOT), ".")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for the environments")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from sage_unsloth.runs.files import write_json

    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    rows = {row["name"]: row for row in earlier if row["name"] in ROWS}
    for name in tqdm(options.rows, unit="row"):
        row = try_python(name, make_environment(*ROWS[name], cache), cache, TESTS)
        rows[name] = row
        print(
            f"{name}: Python {row['python']}, {row['outcome']}, {row['passed']} tests pass, "
            f"{row['failed']} fail. {row['message'][-1000:]}"
        )
        write_json(OUT, {"rows": list(rows.values()), "tests": TESTS})
    return sum(row["outcome"] != "holds" for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
