"""Algorithms by name, and what each changes.

    algorithm = get_algorithm("sage-branch")
    rlvr(algorithm.configure(RlvrConfig()), model, rows, folder, algorithm.guide, algorithm.name)

A row of your own is another `Algorithm`: `replace(ALGORITHMS["sage-branch"], name="mine",
guide=BranchGuide(ratio=0.5))`; the command line takes it as `module:name`, and a package brings it
by an entry point (`own_algorithms`).
"""

import difflib
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

from sage_unsloth.figures import COLUMNS
from sage_unsloth.objective.describe import describe
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.training.algorithm import SETTINGS as SETTINGS
from sage_unsloth.training.algorithm import Algorithm as Algorithm
from sage_unsloth.training.algorithm_rows import ALGORITHMS as ALGORITHMS
from sage_unsloth.training.own_algorithms import Brought, brought_algorithms, named_algorithm
from sage_unsloth.training.rlvr_config import RlvrConfig


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of a name in `ALGORITHMS` or of an installed package, or `module:name`.

    Raises:
        ValueError: an unknown name (the message lists all), or a broken algorithm.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" in name:
        return named_algorithm(name)
    brought = _brought()
    if name in brought:
        result = brought[name]
        if result.algorithm is None:
            raise ValueError(
                f"the algorithm {name!r} of {result.package} cannot be used: {result.problem}. Fix "
                "or uninstall that package"
            )
        return result.algorithm
    names = [*ALGORITHMS, *brought]
    # "SAGE_Branch" should suggest sage-branch.
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=1, cutoff=0.5)
    raise ValueError(
        f"an algorithm must be one of {', '.join(names)}, or module:name of your own, got {name!r}"
        + (f". Did you mean {near[0]!r}?" if near else "")
    )


def changes(algorithm: Algorithm, base: Algorithm = ALGORITHMS["grpo"]) -> dict[str, Any]:
    """The settings and the guide in which `algorithm` differs from `base`, with its values."""
    values, others = algorithm.decided(), base.decided()
    changed = {
        name: value
        for name, value in values.items()
        if value != others.get(name, getattr(RlvrConfig, name))
    }
    return changed | ({} if algorithm.guide == base.guide else {"guide": algorithm.guide})


def listing() -> str:
    """Every algorithm on two lines: its changes against grpo, and its gradient.

    An installed package's algorithm also names the package, or why it cannot be used.
    """
    blocks: list[tuple[str, tuple[str, ...]]] = [
        (name, (_changes_text(algorithm), algorithm.description))
        for name, algorithm in ALGORITHMS.items()
    ]
    for name, result in _brought().items():
        texts = (f"cannot be used: {result.problem}",)
        if result.algorithm is not None:
            texts = (_changes_text(result.algorithm), result.algorithm.description)
        blocks.append((name, (*texts, f"from {result.package}")))
    width = 2 + max(len(name) for name, _ in blocks)
    return "\n".join(
        textwrap.fill(
            text,
            COLUMNS,
            initial_indent=f"{'' if line else name:{width}}",
            subsequent_indent=" " * width,
        )
        for name, texts in blocks
        for line, text in enumerate(texts)
    )


def _brought() -> dict[str, Brought]:
    return brought_algorithms(frozenset(ALGORITHMS))


def algorithm_table() -> str:
    what = "which gradient, or what it isolates"
    rows = [
        ("algorithm", "changes against grpo", what, "group", "row of the paper"),
        ("---",) * 5,
        *(
            (f"`{name}`", _changes_text(row), row.description, row.group, row.paper_row or "none")
            for name, row in ALGORITHMS.items()
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _changes_text(algorithm: Algorithm) -> str:
    changed = changes(algorithm)
    if "guide" in changed:
        changed["guide"] = _guide_text(algorithm.guide)
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "nothing"


def _guide_text(guide: Any) -> str:
    """A dataclass guide's class and non-default fields; otherwise `describe`."""
    if not is_dataclass(guide):
        return describe(guide)
    given = [
        f"{field.name}={_guide_text(value) if isinstance(value, Guide) else repr(value)}"
        for field in fields(guide)
        if field.init and (value := getattr(guide, field.name)) != field.default
    ]
    return type(guide).__name__ + (f"({', '.join(given)})" if given else "")
