"""Lists the branches of the package that only a GPU reaches, each with what runs it there.

    python -m research.gpu_lines
    python -m research.gpu_lines --coverage .coverage --out data/results/coverage/gpu_lines.json

A branch is an `if`, or a choice between two values, whose condition asks for a GPU: `has_gpu()`,
`torch.cuda`, a device's type, vLLM inside Unsloth (`fast_inference`) or its standby. They are read
from the source, so the table changes with it (`docs/tables/gpu-lines.md`). With the data of
coverage.py of a run of the tests on a CPU, the list is compared with what ran there.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sage_unsloth
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.record import environment

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
    result: dict[Branch, None] = {}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for function, condition in _conditions(tree, ()):
            result[Branch(name, function, condition)] = None
    return list(result)


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


Lines = frozenset[int]
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def statements(tree: ast.AST) -> dict[int, Lines]:
    """Of each statement that does something: its first line, and every line of its own."""
    result = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.Global | ast.Nonlocal):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring, or the body of a protocol
        if isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        inner: Any = getattr(node, "body", None)
        if isinstance(node, ast.Match):
            after = node.subject.lineno + 1
        else:
            after = inner[0].lineno if inner else (node.end_lineno or node.lineno) + 1
        result[node.lineno] = frozenset(range(node.lineno, max(after, node.lineno + 1)))
    return result


def sides(tree: ast.AST) -> Iterator[tuple[str, Lines, Lines]]:
    """Of each `if` that asks for a GPU: condition, its statements, and those in their place.

    Where it has no `else` and leaves its block, the rest of the block is in its place.
    """
    for parent in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            rows: Any = getattr(parent, block, None)
            for place, node in enumerate(rows if isinstance(rows, list) else ()):
                if isinstance(node, ast.If) and ASKS.search(condition := ast.unparse(node.test)):
                    other = node.orelse
                    if not other and isinstance(node.body[-1], ENDS):
                        other = rows[place + 1 :]
                    yield condition, _lines(node.body), _lines(other)


def _lines(block: list[ast.stmt]) -> Lines:
    return frozenset(line for node in block for line in statements(node))


def compare(executed: dict[str, Lines], root: Path = ROOT) -> dict:
    """The list beside what ran on a CPU.

    Args:
        executed: file below `root` -> lines that ran.
        root: of the sources.

    Returns:
        `both_ran`: listed conditions of which both sides ran, so the list is wrong there or a test
        makes the condition true without a GPU; `one_ran`, `none_ran`: how many; `open`: file ->
        lines that never ran and stand in no listed side, so they are of a CPU and untested, or are
        missing from the list.
    """
    both, counts = [], {"one_ran": 0, "none_ran": 0}
    total = ran_in_all = explained = 0
    rest: dict[str, list[int]] = {}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        lines = statements(tree)
        ran = {first for first, own in lines.items() if own & executed.get(name, frozenset())}
        of_gpu: set[int] = set()
        for condition, body, other in sides(tree):
            if body & ran and (other & ran or not other):
                both.append(f"{name}: {condition}")
            else:
                counts["one_ran" if (body | other) & ran else "none_ran"] += 1
            of_gpu |= body | other
        never = set(lines) - ran
        total, ran_in_all = total + len(lines), ran_in_all + len(ran)
        explained += len(never & of_gpu)
        if never - of_gpu:
            rest[name] = sorted(never - of_gpu)
    return {
        "statements": total,
        "ran": ran_in_all,
        "never_ran_and_listed": explained,
        "never_ran_and_not_listed": sum(map(len, rest.values())),
        **counts,
        "both_ran": both,
        "open": rest,
    }


def executed_lines(data_file: Path) -> dict[str, Lines]:
    """Of a data file of coverage.py: file of the package -> lines that ran, in any checkout."""
    from coverage import CoverageData

    data = CoverageData(str(data_file))
    data.read()
    lines: dict[str, Lines] = {}
    for path in data.measured_files():
        name = path.rpartition(f"/{ROOT.name}/")[2]
        lines[name] = lines.get(name, frozenset()) | frozenset(data.lines(path) or ())
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="data of coverage.py")
    parser.add_argument("--out", type=Path, metavar="JSON", help="the comparison, written there")
    options = parser.parse_args()
    if options.coverage:
        result = compare(executed_lines(options.coverage))
        if options.out:
            write_json(options.out, result | {"environment": environment()})
        print(json.dumps({k: v for k, v in result.items() if k != "open"}, indent=2))
        return 0
    _, rows = table()
    for row in rows:
        print(" | ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
