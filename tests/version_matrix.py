"""Does the patch hold on other versions, or refuse?

    python tests/version_matrix.py --cache FOLDER [--newest]

For each row the named releases are installed without their dependencies (torch with them) into
folders of the cache, over the environment that runs this script; then the contract is checked and
`TESTS` run, of which `COMPILED` once more with Unsloth's compilation. Three outcomes are right:
"holds" (the contract and every test), "refuses" (a ContractError, with what it says) and "does not
import" (with Unsloth's own message). "FAILS" is the one that must not be: the contract holds and a
loss is wrong.

`--newest` adds rows for the packages of which the index has a newer release than the environment:
all of them together, all but torch, and torch alone. Which of them pip would install beside each
other is another question: a row names the requirements of unsloth and unsloth_zoo that its versions
do not meet.

Rows of TRL's own trainer leave Unsloth out, which is installed and not imported.

vllm is not run (it needs a GPU): its row has outcome "not run" and names what vllm's own
requirements exclude of the environment.

The result is `data/results/reliability/versions.json`; `python docs/tables.py` makes a table of it.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "data" / "results" / "reliability" / "versions.json"
UNSLOTH = "2026.10.9"
"""The newest of the tested versions."""
LOWEST = "lowest of each range"
"""Of `pyproject.toml`; tokenizers as that transformers asks for."""
ROWS: dict[str, list[list[str]]] = {
    "pinned": [],
    UNSLOTH: [[f"unsloth=={UNSLOTH}", f"unsloth_zoo=={UNSLOTH}"]],
    "an older one": [["unsloth==2026.9.14", "unsloth_zoo==2026.9.9"]],
    LOWEST: [
        ["trl==1.14.0"],
        ["transformers==5.15.0", "tokenizers==0.22.2"],
        ["peft==0.20.0"],
        ["datasets==4.6.0"],
    ],
}
"""Name -> groups of releases over the environment; each group has a folder."""
SUPPORTED = ("pinned", UNSLOTH, LOWEST)
"""Rows that must hold, because `pyproject.toml` allows their releases."""
TOGETHER = {
    "unsloth": ["unsloth", "unsloth_zoo"],
    "trl": ["trl"],
    "transformers": ["transformers"],
    "peft": ["peft"],
    "torch": ["torch", "torchvision"],
}
"""What `--newest` looks up, and installs together."""
COMPILED = ["tests/patch/test_guards.py", "tests/trainers/test_rollout_weights.py"]
TESTS = [
    "tests/objective/test_losses.py",
    "tests/patch/test_patch.py::test_q_of_one_is_bitwise_the_unpatched_trainer",
    "tests/patch/test_patch.py::test_loss_and_gradients_equal_the_oracle",
    "tests/patch/test_patch.py::test_drift_is_refused",
    "tests/patch/test_patch_estimators.py::test_loss_gradients_and_kl_equal_the_oracle",
    "tests/patch/test_versions.py::test_q_of_one_is_the_same_bits",
    *COMPILED,
]
OWN_TRL = {"TRL's own trainer, 1.15.0": [], "TRL's own trainer, 1.16.0": [["trl==1.16.0"]]}
"""Rows without Unsloth: what is installed beside it is tried on `trl.GRPOTrainer` itself."""
OWN_TRL_TESTS = [f"tests/patch/own_trl/{n}.py" for n in ("head", "guards", "choices", "losses")]
"""Each in a process of its own."""
PACKAGES = (
    "unsloth",
    "unsloth_zoo",
    "trl",
    "transformers",
    "peft",
    "torch",
    "bitsandbytes",
    "datasets",
)
OWN_TRL_CONTRACT = """
import importlib.metadata, json
versions = {name: importlib.metadata.version(name) for name in %r if "unsloth" not in name}
report = {"versions": versions, "not_met": []}
try:
    from sage_unsloth.methods.own_penalty import check_penalties
    from sage_unsloth.patch.seam import check_contract
    from sage_unsloth.trainers.trainer_names import ContractError
    from trl import GRPOTrainer
    try:
        check_contract(GRPOTrainer)
        check_penalties(GRPOTrainer)
        report |= {"outcome": "holds", "message": ""}
    except ContractError as error:
        report |= {"outcome": "refuses", "message": str(error)}
except Exception as error:
    report |= {"outcome": "does not import", "message": f"{type(error).__name__}: {error}"}
print("\\nREPORT " + json.dumps(report))
"""
CONTRACT = """
import importlib.metadata, json, sys
from packaging.requirements import Requirement
versions = {name: importlib.metadata.version(name) for name in %r}
wanted = {
    str(requirement)
    for package in ("unsloth", "unsloth_zoo")
    for requirement in map(Requirement, importlib.metadata.requires(package))
    if requirement.name in versions
    if requirement.marker is None or requirement.marker.evaluate()
    if not requirement.specifier.contains(versions[requirement.name])
}
report = {"versions": versions, "not_met": sorted(text.split(";")[0] for text in wanted)}
try:
    from sage_unsloth import ContractError, load_unsloth
    from sage_unsloth.methods.own_penalty import check_penalties
    from sage_unsloth.patch.seam import check_contract
    try:
        load_unsloth()
        from trl import GRPOTrainer
        check_contract(GRPOTrainer)
        check_penalties(GRPOTrainer)
        report |= {"outcome": "holds", "message": ""}
    except ContractError as error:
        report |= {"outcome": "refuses", "message": str(error)}
except Exception as error:
    report |= {"outcome": "does not import", "message": f"{type(error).__name__}: {error}"}
print("\\nREPORT " + json.dumps(report))
"""


def newest() -> dict[str, list[list[str]]]:
    """The rows of `--newest`, by what the index has now."""

    def latest(package: str) -> str:
        command = [sys.executable, "-m", "pip", "index", "versions", package]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.match(r"\S+ \((\S+)\)", said)
        assert found, said
        return found[1]

    groups = {}
    for name, packages in TOGETHER.items():
        releases = {package: latest(package) for package in packages}
        if releases[name] != importlib.metadata.version(name).partition("+")[0]:
            groups[name] = [f"{package}=={version}" for package, version in releases.items()]
    others = [group for name, group in groups.items() if name != "torch"]
    rows = {"newest of all": list(groups.values()), "newest, without torch": others}
    if "torch" in groups:
        rows["newest torch"] = [groups["torch"]]
    return {name: row for name, row in rows.items() if row and row not in ROWS.values()}


def newest_vllm() -> dict:
    """The row of the newest vllm, by its requirements alone."""
    from packaging.requirements import Requirement

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps"]
        subprocess.run(
            [*command, "--ignore-installed", "--report", str(report), "vllm"], check=True
        )
        found = json.loads(report.read_text())["install"][0]["metadata"]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    here = versions | {"certifi": importlib.metadata.version("certifi")}
    wanted = [Requirement(text) for text in found["requires_dist"] if "extra ==" not in text]
    not_met = [str(w) for w in wanted if w.name in here and not w.specifier.contains(here[w.name])]
    return {
        "name": "newest vllm",
        "beside": [f"vllm=={found['version']}"],
        "versions": versions,
        "not_met": not_met,
        "outcome": "not run",
        "message": "",
        "passed": 0,
        "failed": 0,
    }


def install(releases: list[str], cache: Path, installer: list[str]) -> Path:
    """The folder of the cache that holds these releases."""
    folder = cache / re.sub(r"[^\w.-]", "-", " ".join(releases))
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        # PyTorch comes with the CUDA libraries of its own release.
        alone = [] if releases[0].startswith("torch==") else ["--no-deps"]
        subprocess.run([*installer, *alone, "--target", str(partial), *releases], check=True)
        partial.rename(folder)
    return folder


def try_versions(
    name: str, groups: list[list[str]], cache: Path, installer: list[str], tests: list[str]
) -> dict:
    """One row: what the contract says of these releases, and then how many tests pass."""
    folders = [install(releases, cache, installer) for releases in groups]
    path = os.pathsep.join([*map(str, folders), str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(cache / f"compiled-{re.sub(r'[^0-9a-z.]', '-', name)}"),
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

    own_trl = name in OWN_TRL
    if own_trl and tests is TESTS:
        tests = OWN_TRL_TESTS
    said = run("-c", (OWN_TRL_CONTRACT if own_trl else CONTRACT) % (PACKAGES,))
    found = re.search(r"^REPORT (.*)$", said, re.MULTILINE)
    releases = [release for group in groups for release in group]
    row = {"name": name, "beside": [r for r in releases if not r.startswith("unsloth")]}
    row |= (
        json.loads(found[1])
        if found
        else {"versions": {}, "not_met": [], "outcome": "FAILS", "message": said[-2_000:]}
    )
    row |= {"passed": 0, "failed": 0, "tests": tests}
    if row["outcome"] == "holds":
        compiled = [test for test in tests if test in COMPILED]
        calls = (tests, ["--compiled", *compiled] if compiled else [])
        for arguments in [[test] for test in tests] if own_trl else calls:
            if not arguments:
                continue
            said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
            counts = {"passed": 0, "failed": 0}
            for word in ("passed", "failed", "error"):
                for count in re.findall(rf"(\d+) {word}", said.splitlines()[-1] if said else ""):
                    counts["passed" if word == "passed" else "failed"] += int(count)
            row |= {key: row[key] + count for key, count in counts.items()}
            if counts["failed"] or not counts["passed"]:
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
    parser.add_argument("--rows", nargs="+", help="names (default: all)")
    parser.add_argument("--newest", action="store_true", help="add what the index has now")
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
    known = ROWS | OWN_TRL | (newest() if options.newest else {})
    wanted = options.rows or list(known)
    if unknown := set(wanted) - set(known):
        parser.error(f"--rows must be of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    # Earlier rows stay, those of an earlier --newest until there is another.
    rows = {row["name"]: row for row in earlier if row["name"] in known or not options.newest}
    if options.newest:
        rows["newest vllm"] = newest_vllm()
    for name in tqdm(wanted, unit="row"):
        rows[name] = try_versions(
            name,
            known[name],
            options.cache.resolve(),
            shlex.split(options.installer),
            options.tests,
        )
        row = rows[name]
        print(
            f"{name}: {row['outcome']}, {row['passed']} tests pass, {row['failed']} fail. "
            f"{row['message'][:300]} {' '.join(row['not_met'])}"
        )
        write_json(
            options.out,
            {"rows": list(rows.values()), "environment": environment()},
        )
    refused = [name for name in SUPPORTED if name in wanted and rows[name]["outcome"] != "holds"]
    failed = [name for name in wanted if rows[name]["outcome"] == "FAILS"]
    return len({*refused, *failed})


if __name__ == "__main__":
    sys.exit(main())
