"""Lists the branches of the package that only a GPU reaches, each with what runs it there.

    python -m research.gpu_lines

A branch is an `if`, or a choice between two values, whose condition asks for a GPU: `has_gpu()`,
`torch.cuda`, a device's type, vLLM inside Unsloth (`fast_inference`) or its standby. They are read
from the source, so the table changes with it (`docs/tables/gpu-lines.md`).
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sage_unsloth

ROOT = Path(sage_unsloth.__file__).parent
ASKS = re.compile(
    r"has_gpu\(\)|torch\.cuda|\bgpu\b|device\.type|fast_inference|\bstandby\b|with_vllm"
)
TRAINING = "no check: a stage chooses by it; the first `quickstart` and `train` on a GPU run it"
EVALUATION = "no check: the first `evaluate` on a GPU runs it"
OF_TRL = "no check: `doctor --deep` tests Unsloth's trainer, this is of TRL's own"
ANSWERS: tuple[tuple[str, str], ...] = (
    # What stands first holds; paths begin at the package.
    (r"selftest/", "`doctor --deep` itself"),
    (r"doctor\.py", "`doctor`"),
    (r"models/meter\.py", "cost and plan"),
    (r"models/merging\.py", "export"),
    (r"models/dtypes\.py", "export"),
    (r"models/device\.py:process_device", "no check: several GPUs, one process for each"),
    (r"models/device\.py", "every check of a loss"),
    (r"models/embedded\.py", "no check: the first `quickstart` on a GPU runs it"),
    (
        r"models/loading\.py",
        "no check: the checks of a loss call the same functions of Unsloth (`selftest/policy.py`), "
        "whose signatures a test binds; the first `train` on a GPU runs it",
    ),
    (r"export/exporter\.py:_write_gguf", "no check: it needs llama.cpp and a network"),
    (r"(patch|trainers|methods)/.*trl", OF_TRL),
    (r"(patch|trainers|methods)/.*loading\.py", "contract"),
    (r"(patch|trainers|methods)/.*known_lines\.py", "contract"),
    (
        r"(patch|trainers|methods)/.*loss_scale\.py",
        "not of a GPU: accelerate scales the loss there",
    ),
    (r"(patch|trainers|methods)/", "every check of a loss"),
    (r"sampling/server_calls\.py", OF_TRL),
    (r"sampling/(engine_choice|engine_arguments)\.py", "vLLM"),
    (r"sampling/vllm_engine\.py", f"{EVALUATION} (vLLM itself has run on a CPU)"),
    (r"planning/", "no check: `plan` on a machine with a GPU"),
    (r"training/by_trl\.py", OF_TRL),
    (r"training/", TRAINING),
    (r"study/", TRAINING),
    (r"evaluation/", EVALUATION),
    (r"analysis/", "no check: the first `analyze` on a GPU runs it"),
    (r"grading/", "no check: a process that grades has no GPU"),
    (r"quickstart\.py", "no check: the first `quickstart` on a GPU runs it"),
    (r"hosted\.py", "no check: the install cell of a notebook"),
)
"""Pattern of `file:function`, and the check of `doctor --deep` that runs it there or why none
does."""


@dataclass(frozen=True)
class Branch:
    """One condition; `function` is qualified, `answer` is of `ANSWERS`, None where none holds."""

    file: str
    function: str
    condition: str

    @property
    def answer(self) -> str | None:
        place = f"{self.file}:{self.function}"
        return next((text for pattern, text in ANSWERS if re.match(pattern, place)), None)


def branches(root: Path = ROOT) -> list[Branch]:
    """Every branch that asks for a GPU, in the order of the source, each condition of a function
    once.
    """
    found: dict[Branch, None] = {}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for function, condition in _conditions(tree, ()):
            found[Branch(name, function, condition)] = None
    return list(found)


def _conditions(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = names
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*names, child.name)
        if isinstance(child, ast.If | ast.IfExp | ast.While):
            condition = ast.unparse(child.test)
            if ASKS.search(condition):
                yield ".".join(names), condition
        yield from _conditions(child, inside)


def table() -> tuple[list[str], list[tuple[str, ...]]]:
    """Header and rows: the conditions of a function together."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for branch in branches():
        place = (branch.file, branch.function, branch.answer or "not answered")
        rows.setdefault(place, []).append(f"`{branch.condition}`".replace("|", "\\|"))
    header = ["file", "function", "asks", "check of `doctor --deep`, or why none"]
    return header, [
        (f"`{file}`", f"`{function}`", "; ".join(conditions), answer)
        for (file, function, answer), conditions in rows.items()
    ]


def main() -> int:
    _, rows = table()
    for row in rows:
        print(" | ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
