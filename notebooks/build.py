"""Generates the notebooks from `src/` and executes them.

python notebooks/build.py                    # execute at full size; the outputs are committed
python notebooks/build.py --check            # fail where a notebook's cells differ from its source
python notebooks/build.py --smoke --to DIR   # execute at smoke size into DIR, twice: the second time it resumes
"""

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
DATA = HERE.resolve().parent / "data" / "smoke"
SOURCES = sorted((HERE / "src").glob("*.py"))

# What each notebook is given at smoke size; they run in one folder, in order, as a user would run
# them.
SMOKE = {
    "00_quickstart": "SMOKE = True\nOUT = '00_quickstart'",
    "01_sft": "from pathlib import Path\nSMOKE = True\nMODEL = 'arithmetic-base'\nOUT = "
    "Path('01_sft')\n"
    f"DATA_FILE = {str(DATA / 'openmathreasoning-mini.jsonl')!r}",
    "02_rlvr": "from pathlib import Path\nSMOKE = True\nSTART = Path('01_sft')\nOUT = "
    "Path('02_rlvr')\n"
    f"DATA_FILE = {str(DATA / 'dapo-math-17k.jsonl')!r}",
    "03_pass_at_k": "from pathlib import Path\nSMOKE = True\nTRAINED = Path('00_quickstart')\nOUT "
    "= "
    "Path('03_pass_at_k')\n"
    "SAMPLES, PROBLEMS = 4, 4",
    "04_analysis": "from pathlib import Path\nSMOKE = True\nTRAINED = Path('00_quickstart')\nOUT = "
    "Path('04_analysis')\n"
    "GRID = Path('04_grid')",
    "05_theory": "OUT = '05_theory'\nTREES, DRAWS, RUNS, STEPS = 50, 40, 20, 20",
}


def from_source(source: Path) -> nbformat.NotebookNode:
    """The notebook of a source, without outputs; cell ids depend on position alone."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata.pop("jupytext", None)
    return notebook


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run every cell in `folder`; progress bars, library banners (stderr) and this machine's paths
    are not kept.
    """
    NotebookClient(
        notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if output.output_type == "stream":
                    for path, shown in (
                        (sys.executable, "python"),
                        (folder.resolve(), "."),
                        (HERE.resolve().parent, "."),
                    ):
                        output.text = output.text.replace(str(path), shown)
            cell.metadata.pop("execution", None)
    notebook.metadata.pop("language_info", None)
    return notebook


def with_parameters(notebook: nbformat.NotebookNode, code: str) -> nbformat.NotebookNode:
    """The notebook with a cell behind the one tagged `parameters`."""
    position = next(
        i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])
    )
    notebook.cells.insert(position + 1, nbformat.v4.new_code_cell(code, id="injected-parameters"))
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--to", type=Path, default=HERE.parent)
    options = parser.parse_args()
    stale = []
    for source in SOURCES:
        target = HERE / f"{source.stem}.ipynb"
        if options.check:
            if not target.exists() or cells(nbformat.read(target, 4)) != cells(from_source(source)):
                stale.append(target.name)
        elif options.smoke:
            options.to.mkdir(parents=True, exist_ok=True)
            for attempt in ("first", "second"):
                notebook = with_parameters(from_source(source), SMOKE[source.stem])
                nbformat.write(
                    execute(notebook, options.to), options.to / f"{source.stem}-{attempt}.ipynb"
                )
                print(f"{source.stem}: executed ({attempt} time)")
        else:
            nbformat.write(execute(from_source(source), HERE.parent), target)
            print(f"{target}: written")
    if stale:
        print(
            f"differ from their source, run python notebooks/build.py: {', '.join(stale)}",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
