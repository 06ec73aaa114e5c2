"""Which packages of a hosted image does the notebooks' install cell replace? A dry run of pip.

    python tests/hosted_image.py --python PYTHON3.13 --work FOLDER

The image is a list of its packages and versions (`data/hosted/`). In an environment of that Python
an empty package of each name and version stands for the image's, with the image's own pip beside
them; then `pip install --dry-run` is asked for what `sage_unsloth.hosted.choose` decides for each
machine of `MACHINES`. What the image's packages ask for themselves is not in the list, so pip takes
their requirements as met. The result is `data/results/hosted/colab.json`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from packaging.utils import canonicalize_name

from sage_unsloth import hosted

ROOT = Path(__file__).resolve().parent.parent

IMAGE = ROOT / "data" / "hosted" / "colab-gpu.txt"
OUT = ROOT / "data" / "results" / "hosted" / "colab.json"
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # of PyTorch 2.11 for CUDA 12.8
T4, L4 = (
    hosted.Card(name="Tesla T4", capability=(7, 5)),
    hosted.Card(name="NVIDIA L4", capability=(8, 9)),
)
MACHINES = {
    "no GPU": {},
    "T4": {"cards": (T4,), "driver": 550, "arches": ARCHES},
    "L4": {"cards": (L4,), "driver": 580, "arches": ARCHES},
}
"""A free and a paid card of the hosts, each with a driver that it may have."""


def packages(image: Path = IMAGE) -> dict[str, str]:
    """Names -> versions of an image's list."""
    lines = [line for line in image.read_text().splitlines() if line and not line.startswith("#")]
    return {
        canonicalize_name(name): version for name, _, version in (x.partition("==") for x in lines)
    }


def wanted() -> tuple[str, ...]:
    """What a notebook with vLLM asks for, from `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return (*project["dependencies"], *project["optional-dependencies"]["vllm"])


def choices() -> dict[str, hosted.InstallPlan]:
    """What `choose` decides on the image with each machine's cards."""
    found = packages()
    return {
        name: hosted.choose(hosted.Machine(packages=found, **facts), wanted())
        for name, facts in MACHINES.items()
    }


def make_image(python: str, folder: Path) -> Path:
    """An environment in which pip finds the image's packages installed; returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    inside = folder / "bin" / "python"
    listed = packages()
    subprocess.run([inside, "-m", "pip", "install", "-q", f"pip=={listed.pop('pip')}"], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name, version in listed.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").write_text("")
    return inside


def dry_run(python: Path, choice: hosted.InstallPlan, work: Path) -> dict[str, str]:
    """Names -> versions of all that pip would install."""
    kept, report = work / "kept.txt", work / "report.json"
    kept.write_text("\n".join(choice.constraints) + "\n")
    command = [python, "-m", "pip", "install", "-q", "--dry-run", "--report", report, "-c", kept]
    subprocess.run([*command, *choice.requirements], check=True)
    found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {canonicalize_name(one["name"]): one["version"] for one in found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of the image's version")
    parser.add_argument("--work", type=Path, required=True, help="folder for the environment")
    options = parser.parse_args()
    from sage_unsloth.runs.files import write_json

    options.work.mkdir(parents=True, exist_ok=True)
    inside = make_image(options.python, options.work / "image")
    listed, rows = packages(), []
    for name, choice in choices().items():
        installed = dry_run(inside, choice, options.work)
        replaced = {x: [listed[x], installed[x]] for x in sorted(installed) if x in listed}
        added = {x: installed[x] for x in sorted(installed) if x not in listed}
        rows.append(
            {"machine": name, "kept": choice.constraints, "replaced": replaced, "added": added}
        )
        print(f"{name}: {len(replaced)} replaced, {len(added)} added")
    version = subprocess.run([inside, "-V"], capture_output=True, text=True, check=True).stdout
    OUT.parent.mkdir(parents=True, exist_ok=True)
    head = {"image": IMAGE.name, "python": version.split()[1], "pip": listed["pip"]}
    write_json(OUT, head | {"date": datetime.now(UTC).date().isoformat(), "machines": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
