"""Notebooks equal their sources, call the package, and are safe to run top to bottom."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import nbformat
import pytest

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
        nodes = [type(node) for node in ast.walk(tree)]
        assert not {ast.FunctionDef, ast.ClassDef, ast.Global, ast.Try} & set(nodes), text
        assert "if False" not in text
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1


def test_badges_point_at_this_file(source):
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    repository = urls["Repository"].removeprefix("https://github.com/")
    text = source.read_text()
    links = re.findall(r"github(?:\.com)?/([\w.-]+/[\w.-]+)/blob/main/(notebooks/[\w.-]+)", text)
    assert links == [(repository, f"notebooks/{source.stem}.ipynb")] * 2
    assert f"git+https://github.com/{repository}" in text
