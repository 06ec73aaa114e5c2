"""Notebooks equal their sources, call the package, and are safe to run top to bottom."""

import ast
import copy
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from sage_unsloth.models.embedded import located
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


def test_badges_point_at_this_file(source):
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    repository = urls["Repository"].removeprefix("https://github.com/")
    text = source.read_text()
    links = re.findall(r"github(?:\.com)?/([\w.-]+/[\w.-]+)/blob/main/(notebooks/[\w.-]+)", text)
    assert links == [(repository, f"notebooks/{source.stem}.ipynb")] * 2
    assert f"git+https://github.com/{repository}" in text


def parameters(stem, gpu):
    """What the cell of parameters sets on a machine with a GPU, or without one."""
    (cell,) = (
        cell.source
        for cell in build.from_source(build.HERE / "src" / f"{stem}.py").cells
        if "parameters" in cell.metadata.get("tags", [])
    )
    names = {}
    exec(cell.replace("GPU = torch.cuda.is_available()", f"GPU = {gpu}"), names)
    assert names["GPU"] is gpu
    return SimpleNamespace(**names)


@pytest.mark.parametrize("gpu", (True, False))
def test_the_parameters_are_those_of_the_commands(gpu):
    preset = model_preset("qwen2.5-math-7b" if gpu else "arithmetic-base")
    given, config = parameters("01_sft", gpu), sft_config(preset)
    assert model_path(preset) == located(given.MODEL)
    assert (
        config.max_length, config.max_steps, config.epochs, config.batch_size,
    ) == (given.MAX_LENGTH, given.MAX_STEPS, given.EPOCHS, given.BATCH_SIZE)  # fmt: skip
    assert (
        config.learning_rate, config.save_steps, config.seed,
    ) == (given.LEARNING_RATE, given.SAVE_STEPS, given.SEED)  # fmt: skip
    given, config = parameters("02_rlvr", gpu), rlvr_config(preset)
    assert (
        config.max_prompt_length, config.max_completion_length, config.max_steps,
    ) == (given.MAX_PROMPT, given.MAX_COMPLETION, given.MAX_STEPS)  # fmt: skip
    assert (
        config.prompts_per_step, config.num_generations, config.completions_per_step,
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
            "from sage_unsloth.models.embedded import located",
            "MODEL, OUT = Path(located('arithmetic-base')), Path('notebook')",
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
