"""Notebooks equal their sources, call the package, and are safe to run top to bottom."""

import ast
import copy
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from sage_unsloth.models.embedded import locate_model
from sage_unsloth.planning.presets import model_preset
from sage_unsloth.training.starting import model_path, rlvr_config, sft_config

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


@pytest.fixture(params=build.SOURCES, ids=lambda source: source.stem)
def source(request):
    return request.param


def test_notebook_equals_its_source(source):
    committed = nbformat.read(build.HERE / f"{source.stem}.ipynb", 4)
    assert build.cells(committed) == build.cells(build.from_source(source)), (
        "run python notebooks/build.py"
    )


def test_outputs_that_code_alone_decides_are_those_of_today(source):
    committed = nbformat.read(build.HERE / f"{source.stem}.ipynb", 4)
    assert build.stale_outputs(committed) == [], "run python notebooks/build.py"


@pytest.mark.long
def test_an_output_of_older_code_is_noticed():
    """Notebook 02 once listed 14 algorithms when there were 21."""
    committed = nbformat.read(build.HERE / "02_rlvr.ipynb", 4)
    (number,) = (
        i for i, c in enumerate(committed.cells) if "reproduced" in c.metadata.get("tags", [])
    )
    (output,) = committed.cells[number].outputs
    output.text = output.text.replace("sage-branch-exact", "sage-branch")
    assert build.stale_outputs(committed) == [number]


def test_an_outline_of_older_code_is_noticed():
    committed = nbformat.read(build.HERE / "02_rlvr.ipynb", 4)
    tagged = [i for i, c in enumerate(committed.cells) if "outline" in c.metadata.get("tags", [])]
    assert tagged and build.differing_outlines(committed, committed) == []
    smoke = copy.deepcopy(committed)
    (text,) = (o for o in smoke.cells[tagged[0]].outputs if o.output_type == "stream")
    text.text = text.text.replace("rows ", "8 rows ").replace("220", " 64")
    found = build.differing_outlines(smoke, committed)
    assert len(found) >= 2 and all(line.startswith(f"cell {tagged[0]}: ") for line in found)
    text.text = committed.cells[tagged[0]].outputs[0].text.replace("220", " 64")
    assert build.differing_outlines(smoke, committed) == []


def test_notebook_carries_the_outputs_of_a_real_run(source):
    committed = nbformat.read(build.HERE / f"{source.stem}.ipynb", 4)
    outputs = [
        output for cell in committed.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(
        output.output_type == "error" or output.get("name") == "stderr" for output in outputs
    )
    assert all(len(str(output)) < 400_000 for output in outputs)
    assert "widgets" not in committed.metadata


def test_code_is_plain(source):
    notebook = build.from_source(source)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for text in code:
        tree = ast.parse(re.sub(r"^(\s*)%.*$", r"\1pass", text, flags=re.MULTILINE))
        nodes = list(ast.walk(tree))
        assert not {ast.ClassDef, ast.Global, ast.Try} & {type(node) for node in nodes}, text
        # A reward of one's own is a function; anything longer belongs into the package.
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        for node in functions:
            said = len((ast.get_docstring(node) or "").splitlines())
            assert len(ast.unparse(node).splitlines()) - said <= 4, text
        assert "if False" not in text
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1


LINK = r"github(?:\.com)?/([\w.-]+/[\w.-]+)/blob/main/([\w./-]*\w)"


def test_links_are_absolute_and_lead_to_files(source):
    """On Colab a relative link leads nowhere."""
    text = "\n".join(
        cell.source for cell in build.from_source(source).cells if cell.cell_type == "markdown"
    )
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert target.startswith("https://"), target
    for _, file in re.findall(LINK, text):
        assert (ROOT / file).exists() or file == f"notebooks/{source.stem}.ipynb", file


def test_formulas_become_mathml(source):
    """The site shows them without a script; an unknown command would stop its build."""
    from docutils.utils.math.latex2mathml import tex2mathml

    for cell in build.from_source(source).cells:
        if cell.cell_type == "markdown":
            for display, inline in re.findall(
                r"\$\$(.+?)\$\$|\$([^$]+?)\$", cell.source, re.DOTALL
            ):
                tex2mathml(display or inline)


def test_no_picture_of_one_run_without_the_eight_seeds(source):
    """Bold, with the figures of the committed table, in every notebook that shows pass@k."""
    text = " ".join(re.sub(r"^# ?", "", source.read_text(), flags=re.MULTILINE).split())
    if "pass_at_k.png" not in text and "plot_dynamics" not in text:
        return
    report = json.loads((ROOT / "data/results/benchmark/arithmetic/report.json").read_text())
    rows = report["sets"]["test"]["points"]["sage-branch"]["to_baseline"]
    for k in ("1", "32"):
        mean, low, high = (f"{rows[k][name]:+.3f}" for name in ("mean", "low", "high"))
        shown = f"{mean} [{low}, {high}]".replace("0.", ".").replace("-", "−")
        assert f"{shown} at pass@{k}" in text
    assert re.search(r"\*\*(This is one run|One run, one training seed)", text)
    assert "blob/main/data/results/benchmark/arithmetic/report.md" in text


def test_badges_ask_for_a_gpu_where_one_is_used(source):
    committed = nbformat.read(build.HERE / f"{source.stem}.ipynb", 4)
    asks = committed.metadata.get("accelerator") == "GPU"
    assert asks == ("plan_for_card" in source.read_text())
    if asks:
        assert committed.metadata["colab"]["gpuType"] == "T4"
        assert committed.metadata["kaggle"]["isGpuEnabled"]


INSTALL = """
import importlib.util
{check}
    print("installs")
"""


@pytest.mark.parametrize(
    ("files", "installs"),
    [
        ((), True),
        (("sage_unsloth/pyproject.toml", "sage_unsloth/sage_unsloth/__init__.py"), True),  # a clone
        (("sage_unsloth/__pycache__/front.pyc",), True),  # after an uninstall
        (("sage_unsloth/__init__.py",), False),
    ],
)
def test_the_install_cell_takes_no_bare_folder_for_the_package(tmp_path, source, files, installs):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    check = re.search(r"^(spec = .*)\n(if spec[^#]*:)", source.read_text(), flags=re.MULTILINE)
    code = INSTALL.format(check="\n".join(check.groups()))
    # -S: without the packages of this environment, ours among them.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "installs" * installs


BESIDE = {  # what else lies in the folder in which a notebook runs
    "00_quickstart": ("sage_unsloth/pyproject.toml", "sage_unsloth/sage_unsloth/__init__.py"),
    "06_your_own_questions": ("sage_unsloth/__pycache__/front.pyc",),
}


@pytest.mark.long
def test_a_notebook_runs_alone_and_again(tmp_path, source):
    """From a folder of its own, in its own process: in an empty one, beside a clone of the
    repository, or beside what an uninstall has left; a second run resumes.
    """
    for name in BESIDE.get(source.stem, ()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    notebook = build.with_parameters(build.from_source(source), build.SMOKE[source.stem])
    build.execute(notebook, tmp_path)
    committed = nbformat.read(build.HERE / f"{source.stem}.ipynb", 4)
    assert build.differing_outlines(notebook, committed) == []
    again = build.from_source(source)
    build.execute(build.with_parameters(again, build.SMOKE[source.stem]), tmp_path)


def test_badges_point_at_this_file(source):
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    repository = urls["Repository"].removeprefix("https://github.com/")
    text = source.read_text()
    badges = [line for line in text.splitlines() if line.startswith("# [![")]
    links = re.findall(LINK, "\n".join(badges))
    assert links == [(repository, f"notebooks/{source.stem}.ipynb")] * 2
    assert f"git+https://github.com/{repository}" in text


def parameters(stem, memory, monkeypatch):
    """What the cells of the card and of the parameters set on a machine with this card, or none."""
    from sage_unsloth import hosted
    from sage_unsloth.training import card_plan

    monkeypatch.setattr(card_plan, "memory_of_card", lambda given: memory)
    monkeypatch.setattr(card_plan, "why_not_chosen", lambda **run: None)
    cells = [cell.source for cell in build.from_source(build.HERE / "src" / f"{stem}.py").cells]
    names = {"hosted": hosted}
    for cell in cells:
        if "plan_for_card(" in cell or ("GPU = card.gpu" in cell):
            exec(cell, names)
    assert names["GPU"] is (memory is not None)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("memory", (22.0, 39.4, None))
def test_the_parameters_are_those_of_the_commands(memory, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = parameters("01_sft", memory, monkeypatch)
    preset = model_preset("qwen2.5-math-7b" if memory else "arithmetic-base")
    config = sft_config(preset)
    assert model_path(preset) == locate_model(given.MODEL)
    assert (
        config.max_length, config.max_steps, config.epochs, config.batch_size,
    ) == (given.MAX_LENGTH, given.MAX_STEPS, given.EPOCHS, given.BATCH_SIZE)  # fmt: skip
    assert (
        config.learning_rate, config.save_steps, config.seed,
    ) == (given.LEARNING_RATE, given.SAVE_STEPS, given.SEED)  # fmt: skip
    given = parameters("02_rlvr", memory, monkeypatch)
    preset = model_preset("llama-3.2-1b-instruct" if memory else "arithmetic-base")
    config = rlvr_config(preset, memory)
    assert model_path(preset) == locate_model(given.MODEL)
    assert (
        config.max_prompt_length, config.max_completion_length, config.max_steps,
    ) == (given.MAX_PROMPT, given.MAX_COMPLETION, given.MAX_STEPS)  # fmt: skip
    assert (
        config.prompts_per_step, config.num_generations,
        config.micro_batch_size or config.completions_per_step,
    ) == (given.PROMPTS_PER_STEP, given.NUM_GENERATIONS, given.MICRO_BATCH)  # fmt: skip
    assert (
        config.learning_rate, config.min_p, config.beta, config.save_steps, config.seed,
    ) == (given.LEARNING_RATE, given.MIN_P, given.BETA, given.SAVE_STEPS, given.SEED)  # fmt: skip


# One process, so that Unsloth is loaded once: the cells of the notebook, then the command's stage.
SAME = """
import sys
from dataclasses import replace
from pathlib import Path
import matplotlib; matplotlib.use("agg")
code = Path(sys.argv[1]).read_text()
exec(compile(code, "02_rlvr", "exec"))
from sage_unsloth.training.algorithms import get_algorithm
from sage_unsloth.training.embedded_settings import RLVR
from sage_unsloth.training.rlvr_stage import rlvr
algorithm = get_algorithm("sage-branch")
config = replace(
    algorithm.configure(RLVR), max_steps=2, prompts_per_step=2, num_generations=4,
    micro_batch_size=4, save_steps=1, preflight_prompts=4,
)
command = rlvr(config, MODEL, rows, "command", algorithm.guide, force=True)
from safetensors.torch import load_file
one, other = (load_file(f / "adapter_model.safetensors") for f in (command, OUT / "adapter"))
assert list(one) == list(other)
assert max(value.abs().max() for name, value in one.items() if "lora_B" in name) > 0
assert all((one[name] == other[name]).all() for name in one)
print("the same weights")
"""


@pytest.mark.long
def test_notebook_02_trains_the_weights_of_its_command(tmp_path):
    notebook = build.from_source(build.HERE / "src" / "02_rlvr.py")
    given = "\n".join(
        (
            "from sage_unsloth.models.embedded import locate_model",
            "MODEL, OUT = Path(locate_model('arithmetic-base')), Path('notebook')",
            "MAX_STEPS, PROMPTS_PER_STEP, NUM_GENERATIONS, MICRO_BATCH, SAVE_STEPS = 2, 2, 4, 4, 1",
        )
    )
    notebook = build.with_parameters(notebook, given)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    (tmp_path / "cells.py").write_text(re.sub(r"^(\s*)%.*$", r"\1pass", code, flags=re.MULTILINE))
    done = subprocess.run(
        [sys.executable, "-c", SAME, "cells.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("the same weights\n")
