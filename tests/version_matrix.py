"""Does the patch hold on other versions, or refuse?

    python tests/version_matrix.py --cache FOLDER

For each row the named releases are installed without their dependencies into a folder of the cache,
over the environment that runs this script; then the contract is checked and `TESTS` run. Three
outcomes are right: "holds" (the contract and every test), "refuses" (a ContractError, with what it
says) and "does not import" (with Unsloth's own message). "FAILS" is the one that must not be: the
contract holds and a loss is wrong. The result is `data/results/reliability/versions.json`.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "data" / "results" / "reliability" / "versions.json"
ROWS = {
    "pinned": [],
    "2026.10.9, the newest": ["unsloth==2026.10.9", "unsloth_zoo==2026.10.9"],
    "an older one": ["unsloth==2026.9.14", "unsloth_zoo==2026.9.9"],
    "newest of all": [
        "unsloth==2026.10.9",
        "unsloth_zoo==2026.10.9",
        "trl==1.16.0",
        "transformers==5.23.0",
    ],
}
"""Name -> releases over the environment. Change them as new ones appear."""
TESTS = [
    "tests/objective/test_losses.py",
    "tests/patch/test_patch.py::test_q_of_one_is_bitwise_the_unpatched_trainer",
    "tests/patch/test_patch.py::test_loss_and_gradients_equal_the_oracle",
    "tests/patch/test_patch.py::test_drift_is_refused",
    "tests/patch/test_patch_estimators.py::test_loss_gradients_and_kl_equal_the_oracle",
    "tests/patch/test_versions.py::test_q_of_one_is_the_same_bits",
]
PACKAGES = ("unsloth", "unsloth_zoo", "trl", "transformers", "peft", "torch")
CONTRACT = """
import importlib.metadata, json, sys
report = {"versions": {name: importlib.metadata.version(name) for name in %r}}
try:
    from sage_unsloth import ContractError, load_unsloth
    from sage_unsloth.patch.contract import check_contract
    try:
        check_contract(load_unsloth())
        report |= {"outcome": "holds", "message": ""}
    except ContractError as error:
        report |= {"outcome": "refuses", "message": str(error)}
except Exception as error:
    report |= {"outcome": "does not import", "message": f"{type(error).__name__}: {error}"}
print("\\nREPORT " + json.dumps(report))
"""


def try_versions(
    name: str, releases: list[str], cache: Path, installer: list[str], tests: list[str]
) -> dict:
    """One row: what the contract says of these releases, and then how many tests pass."""
    folder = cache / re.sub(r"[^\w.-]", "-", " ".join(releases) or "pinned")
    if releases and not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run([*installer, "--no-deps", "--target", str(partial), *releases], check=True)
        partial.rename(folder)
    path = os.pathsep.join([str(folder), str(ROOT)] if releases else [str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(cache / f"compiled-{folder.name}"),
    }
    shutil.rmtree(environment["UNSLOTH_COMPILE_LOCATION"], ignore_errors=True)

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    said = run("-c", CONTRACT % (PACKAGES,))
    found = re.search(r"^REPORT (.*)$", said, re.MULTILINE)
    row = {"name": name, "beside": [r for r in releases if not r.startswith("unsloth")]}
    row |= (
        json.loads(found[1])
        if found
        else {"versions": {}, "outcome": "FAILS", "message": said[-2_000:]}
    )
    row |= {"passed": 0, "failed": 0}
    if row["outcome"] == "holds":
        said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
        for word in ("passed", "failed", "error"):
            for count in re.findall(rf"(\d+) {word}", said.splitlines()[-1] if said else ""):
                row["passed" if word == "passed" else "failed"] += int(count)
        if row["failed"] or not row["passed"]:
            row |= {"outcome": "FAILS", "message": said[-2_000:]}
    row["message"] = (
        row["message"]
        .replace(str(cache), "CACHE")
        .replace(str(ROOT), ".")
        .replace(sys.prefix, "ENV")
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for the releases")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument(
        "--installer",
        default=f"{sys.executable} -m pip install",
        help='also "uv pip install --python FILE" (default: %(default)s)',
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from sage_unsloth.runs.files import write_json
    from sage_unsloth.runs.record import environment

    options.cache.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = {row["name"]: row for row in earlier if row["name"] in ROWS}
    for name in tqdm(options.rows, unit="row"):
        rows[name] = try_versions(
            name, ROWS[name], options.cache.resolve(), shlex.split(options.installer), options.tests
        )
        row = rows[name]
        print(
            f"{name}: {row['outcome']}, {row['passed']} tests pass, {row['failed']} fail. "
            f"{row['message'][:300]}"
        )
        write_json(
            options.out,
            {"rows": list(rows.values()), "tests": options.tests, "environment": environment()},
        )
    return sum(row["outcome"] == "FAILS" for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
