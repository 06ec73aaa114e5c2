"""The notebooks' install cell: what it keeps, what it leaves out, what it refuses, and when it asks
for a restart.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import hosted_image
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sage_unsloth
from sage_unsloth import hosted
from sage_unsloth.models import device
from sage_unsloth.models.device import drives

ROOT = Path(__file__).parents[1]
RESULT = json.loads(hosted_image.OUT.read_text())
T4 = hosted.Machine(packages=hosted_image.packages(), **hosted_image.MACHINES["T4"])
L4 = hosted.Machine(packages=hosted_image.packages(), **hosted_image.MACHINES["L4"])
NO_GPU = hosted.Machine(packages=hosted_image.packages())
P100 = hosted.Card(name="Tesla P100-PCIE-16GB", capability=(6, 0))
V100 = hosted.Card(name="Tesla V100-SXM2-16GB", capability=(7, 0))


def choose(machine):
    return hosted.choose(machine, hosted_image.wanted())


def has_vllm(choice):
    return any(text.startswith("vllm") for text in choice.requirements)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (NO_GPU, "there is no GPU"),
        (T4, "needs compute capability 8.0, and Tesla T4 has 7.5"),
        (replace(L4, driver=550), "needs NVIDIA's driver 580 or newer, and this one is 550"),
    ],
)
def test_without_vllm_where_it_does_not_run(machine, reason):
    choice = choose(machine)
    assert not has_vllm(choice)
    assert reason in choice.reasons[0]
    assert choice.constraints == (
        "numpy==2.1.3",
        "pillow==11.3.0",
        "torch==2.11.0+cu128",
        "torchvision==0.26.0+cu128",
        "torchaudio==2.11.0+cu128",
    )


def test_vllm_brings_its_own_torch():
    choice = choose(L4)
    assert has_vllm(choice)
    assert choice.constraints == ("numpy==2.1.3",)
    assert has_vllm(choose(replace(L4, cards=L4.cards * 2)))
    assert not has_vllm(choose(replace(L4, cards=L4.cards + T4.cards)))


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (P100, r"Tesla P100.* needs compute capability 7\.0 or newer, but this GPU has 6\.0"),
        (V100, r"Tesla V100.* PyTorch is compiled for sm_75 sm_80 .*, but this GPU has .* 7\.0"),
    ],
)
def test_a_card_that_nothing_drives_is_refused(card, reason):
    with pytest.raises(hosted.InstallError, match=reason) as error:
        choose(replace(T4, cards=(card,)))
    assert "T4 x2 on Kaggle" in str(error.value)


def test_a_torch_that_is_too_old_is_replaced_where_the_driver_allows_it():
    packages = hosted_image.packages() | {"torch": "2.10.0+cu128"}
    assert choose(hosted.Machine(packages=packages)).constraints == (
        "numpy==2.1.3",
        "pillow==11.3.0",
    )
    assert choose(replace(T4, packages=packages, driver=580)).constraints[0] == "numpy==2.1.3"
    with pytest.raises(hosted.InstallError, match=r">=2\.11.*got PyTorch 2\.10\.0.*driver 550"):
        choose(replace(T4, packages=packages))


def test_drives():
    """The table of CUDA's guide: machine code within its major version, PTX upwards."""
    assert drives(["sm_75"], (7, 5)) and not drives(["sm_75"], (8, 0))
    assert not drives(["sm_80", "sm_86"], (7, 5))
    assert drives(["sm_80"], (8, 9)) and not drives(["sm_86"], (8, 0))
    assert drives(["sm_90a", "compute_90"], (12, 0)) and not drives([], (8, 0))
    assert drives(["sm_100", "sm_120"], (12, 0))


def test_cards_are_read_as_nvidia_prints_them():
    said = "Tesla T4, 7.5, 550.54.15\nTesla T4, 7.5, 550.54.15\n"
    assert device.parse_cards(said) == (T4.cards * 2, 550)
    assert device.parse_cards("") == ((), None)


# --- what pip would do to Colab's image -----------------------------------------------------------


def test_the_dry_run_is_of_todays_choices():
    """If it fails: python tests/hosted_image.py."""
    rows = {row["machine"]: row for row in RESULT["machines"]}
    assert set(rows) == set(hosted_image.MACHINES)
    for name, choice in hosted_image.choices().items():
        row = rows[name]
        assert tuple(row["kept"]) == choice.constraints
        versions = hosted_image.packages() | row["added"]
        versions |= {package: new for package, (_, new) in row["replaced"].items()}
        for text in choice.requirements:
            requirement = Requirement(text)
            version = versions[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), (name, text, version)


def test_of_colabs_packages_these_are_replaced():
    for row in RESULT["machines"]:
        if row["machine"] == "L4":
            assert {"torch", "torchvision", "pillow"} <= set(row["replaced"])
            assert "numpy" not in row["replaced"]
        else:
            assert list(row["replaced"]) == ["datasets", "filelock", "pyarrow", "torchao"]
            assert row["replaced"]["datasets"][0] == "4.0.0"


# --- the cell itself ------------------------------------------------------------------------------


def test_it_needs_nothing_but_lazy_loader_and_packaging(tmp_path):
    for name in ("lazy_loader", "packaging"):
        (folder,) = importlib.util.find_spec(name).submodule_search_locations
        shutil.copytree(folder, tmp_path / name)
    shutil.copytree(ROOT / "sage_unsloth", tmp_path / "sage_unsloth")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from sage_unsloth import hosted"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


def test_where_all_is_there_nothing_is_said_or_done():
    said = []
    hosted.install(vllm=True, say=said.append)
    assert said == []


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """An environment with pip, and `sage_unsloth` installed without its dependencies: `loaded` 1,
    which is there, and `missing`, which is not. A folder of wheels stands for the index.
    """
    folder = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for name in ("lazy_loader", "packaging"):
        (source,) = importlib.util.find_spec(name).submodule_search_locations
        shutil.copytree(source, site / name)
    (site / "here.pth").write_text(str(ROOT) + "\n")
    (folder / "wheels").mkdir()
    return folder, site


def make_wheel(folder, name, version, *needs):
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/top_level.txt", f"{name}\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n")


def run_cell(image, script, *needs):
    """In the image, whose `sage_unsloth` needs these; returns what the script printed."""
    folder, site = image
    info = site / "sage_unsloth-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    text = "Metadata-Version: 2.1\nName: sage_unsloth\nVersion: 0.1.0\n"
    (info / "METADATA").write_text(text + "".join(f"Requires-Dist: {x}\n" for x in needs))
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [folder / "venv" / "bin" / "python", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(image, *arguments):
    python = image[0] / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--no-index", "-f", image[0] / "wheels"]
    subprocess.run([*command, *arguments], check=True)


INSTALL = """
{loads}
import sage_unsloth
from sage_unsloth import hosted
for attempt in (1, 2):
    try:
        hosted.install()
    except RuntimeError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.long
def test_a_restart_is_asked_for_only_where_a_loaded_package_changed(image):
    wheels = image[0] / "wheels"
    make_wheel(wheels, "loaded", "1.0")
    make_wheel(wheels, "numpy", "1.0")
    pip(image, "loaded==1.0", "numpy==1.0")
    make_wheel(wheels, "loaded", "2.0")
    make_wheel(wheels, "missing", "3.0", "numpy")
    make_wheel(wheels, "numpy", "2.0")

    said = run_cell(image, INSTALL.format(loads="import loaded"), "missing>=3")
    assert "Kept as they are: numpy==1.0." in said
    assert "Installing missing>=3" in said and "no restart is needed" in said
    assert "RestartNeededError" not in said

    said = run_cell(image, INSTALL.format(loads="import loaded"), "missing>=3", "loaded>=2")
    asked = [line for line in said.splitlines() if line.startswith("RestartNeededError")]
    assert len(asked) == 2, "and again until it is restarted"
    assert asked[0].endswith("new versions now: loaded 1.0 -> 2.0.")

    older = image[0] / "older"  # as Ubuntu's own packages, behind those of the image
    (older / "loaded-0.5.dist-info").mkdir(parents=True)
    (older / "loaded-0.5.dist-info" / "METADATA").write_text("Name: loaded\nVersion: 0.5\n")
    (image[1] / "older.pth").write_text(f"{older}\n")
    assert run_cell(image, INSTALL.format(loads="import loaded"), "missing>=3", "loaded>=2") == ""


def test_a_notebook_shows_the_request_in_words():
    """A kernel shows an error of an expected event as its sentence, and stops the run."""
    import nbformat
    from nbclient import NotebookClient

    code = "from sage_unsloth import hosted\nraise hosted.RestartNeededError('Please restart.')"
    cells = [nbformat.v4.new_code_cell(text) for text in (code, "print('not run')")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.raises(Exception, match="Please restart"):
        NotebookClient(notebook, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert output.traceback == ["Please restart."]
    assert notebook.cells[1].outputs == []


def test_what_cannot_be_installed_is_said(image):
    said = run_cell(image, INSTALL.format(loads=""), "nowhere>=1")
    assert said.count("InstallError pip failed") == 2
    assert "No matching distribution found for nowhere>=1" in said


def test_the_page_names_only_what_exists():
    """docs/hosted.md once told of a `SETTINGS` that no notebook had."""
    page = (ROOT / "docs" / "hosted.md").read_text()
    code = "\n".join(file.read_text() for file in (ROOT / "notebooks" / "src").glob("*.py"))
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    parameters = {found[1] for text in inline if (found := re.match(r"([A-Z][A-Z_]+)\b", text))}
    variables = {"CUDA_VISIBLE_DEVICES"}
    unknown = {name for name in parameters - variables if not re.search(rf"\b{name}\b.* = ", code)}
    assert parameters and not unknown
    numbers = set(re.findall(r"\b0\d\b", page))
    assert numbers <= {file.name[:2] for file in (ROOT / "notebooks" / "src").glob("*.py")}
    assert "plan_for_card" in sage_unsloth.__all__ and "`plan_for_card`" in page
