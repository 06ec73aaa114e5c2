"""Generates the notebooks from `src/` and executes them.

python notebooks/build.py                    # execute at full size; the outputs are committed
python notebooks/build.py --check            # fail where a notebook is not what its source gives
python notebooks/build.py --smoke --to DIR   # execute at smoke size, each in a folder of its own in
                                             # DIR, twice: the second time it resumes
python notebooks/build.py 00 03              # execute only these, at full size

A notebook is checked for its cells, and for the outputs of those that are tagged `reproduced`:
cells that need no cell before them, and print what code alone decides. `--smoke` also compares the
outputs of those that are tagged `outline`, but for their numbers.
"""

import argparse
import copy
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
DATA = HERE.resolve().parent / "data" / "smoke"
SOURCES = sorted((HERE / "src").glob("*.py"))

NUMBER = r"[-+]?\d[\d,]*\.?\d*"

# What each notebook is given at smoke size. Each runs alone, in a folder of its own.
SMOKE = {
    "00_quickstart": "SMOKE = True",
    "01_sft": f"""DATA, DATA_FILE = 'openmath', {str(DATA / "openmathreasoning-mini.jsonl")!r}
MAX_STEPS, BATCH_SIZE, SAVE_STEPS, HELD_OUT = 2, 4, 1, 4""",
    "02_rlvr": f"""DATA, DATA_FILE = 'dapo', {str(DATA / "dapo-math-17k.jsonl")!r}
MAX_STEPS, PROMPTS_PER_STEP, NUM_GENERATIONS, MICRO_BATCH, SAVE_STEPS = 2, 2, 4, 4, 1""",
    "03_pass_at_k": "SMOKE = True\nSAMPLES, PROBLEMS = 4, 4",
    "04_analysis": "SMOKE = True",
    "05_theory": "TREES, DRAWS, RUNS, STEPS = 50, 40, 20, 20",
    "06_your_own_questions": """SFT_STEPS, STEPS, PROMPTS_PER_STEP, NUM_GENERATIONS = 2, 2, 2, 4
SAMPLES, HELD_OUT, SHOW_EVERY = 4, 4, 1""",
}
GPU = ("01_sft", "02_rlvr", "06_your_own_questions")
"""Notebooks whose badge asks Colab and Kaggle for a GPU."""
ACCELERATOR = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
}


def from_source(source: Path) -> nbformat.NotebookNode:
    """The notebook of a source, without outputs; cell ids depend on position alone."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata.pop("jupytext", None)
    if source.stem in GPU:
        notebook.metadata.update(copy.deepcopy(ACCELERATOR))
    return notebook


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def stale_outputs(notebook: nbformat.NotebookNode) -> list[int]:
    """Numbers of the cells tagged `reproduced` whose outputs are not what today's code prints."""
    chosen = [
        number
        for number, cell in enumerate(notebook.cells)
        if "reproduced" in cell.metadata.get("tags", [])
    ]
    if not chosen:
        return []
    today = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(notebook.cells[number].source) for number in chosen]
    )
    today = execute(today, HERE.parent)
    return [
        number
        for number, cell in zip(chosen, today.cells, strict=True)
        if shown(cell) != shown(notebook.cells[number])
    ]


def shown(cell: nbformat.NotebookNode) -> list[str]:
    """A cell's outputs as text; what is printed in pieces is one piece."""
    found = []
    for output in cell.outputs:
        if output.output_type != "stream":
            found.append(str(output.data.get("text/html") or output.data.get("text/plain")))
        elif found and found[-1].startswith("stream"):
            found[-1] += output.text
        else:
            found.append(f"stream {output.text}")
    return found


def outline(cell: nbformat.NotebookNode) -> set[str]:
    """What stays of a cell's outputs whatever was trained, on however many rows: their kinds, and
    the lines of text with # in the place of numbers.
    """
    kinds = {
        "text" if output.output_type == "stream" else ", ".join(sorted(output.data))
        for output in cell.outputs
    }
    text = "\n".join(
        o.text if o.output_type == "stream" else o.data["text/plain"]
        for o in cell.outputs
        if o.output_type == "stream" or "text/html" in o.data  # a table
    )
    lines = (" ".join(re.sub(NUMBER, "#", line).split()) for line in text.splitlines())
    return kinds | {line for line in lines if re.search("[a-z]", line)}


def differing_outlines(smoke: nbformat.NotebookNode, committed: nbformat.NotebookNode) -> list[str]:
    """What one of the two prints and the other does not, in cells that are tagged `outline`."""
    cells = [cell for cell in smoke.cells if cell["id"] != "injected-parameters"]
    return [
        f"cell {number}: {line}"
        for number, (one, other) in enumerate(zip(cells, committed.cells, strict=True))
        if "outline" in one.metadata.get("tags", [])
        for line in sorted(outline(one) ^ outline(other))
    ]


def is_stale(source: Path) -> bool:
    """Whether the committed notebook has other cells than its source, or outputs that today's code
    would not print.
    """
    target = HERE / f"{source.stem}.ipynb"
    if not target.exists():
        return True
    committed = nbformat.read(target, 4)
    return cells(committed) != cells(from_source(source)) or bool(stale_outputs(committed))


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
    parser.add_argument("names", nargs="*", help="how their names begin (default: all)")
    options = parser.parse_args()
    stale = []
    for source in SOURCES:
        if options.names and not source.stem.startswith(tuple(options.names)):
            continue
        if options.check:
            if is_stale(source):
                stale.append(f"{source.stem}.ipynb")
        elif options.smoke:
            folder = options.to / source.stem
            folder.mkdir(parents=True, exist_ok=True)
            for attempt in ("first", "second"):
                notebook = with_parameters(from_source(source), SMOKE[source.stem])
                execute(notebook, folder)
                nbformat.write(notebook, options.to / f"{source.stem}-{attempt}.ipynb")
                print(f"{source.stem}: executed ({attempt} time)")
                if attempt == "first":
                    committed = nbformat.read(HERE / f"{source.stem}.ipynb", 4)
                    different = differing_outlines(notebook, committed)
                    stale += [f"{source.stem}.ipynb"] * bool(different)
                    print(*different, sep="\n", end="\n" * bool(different), file=sys.stderr)
        else:
            target = HERE / f"{source.stem}.ipynb"
            nbformat.write(execute(from_source(source), HERE.parent), target)
            print(f"{target}: written")
    if stale:
        print(
            f"not what their sources give, run python notebooks/build.py: {', '.join(stale)}",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
