"""Algorithms by name, and what each changes.

    algorithm = get_algorithm("sage-branch")
    rlvr(algorithm.configure(RlvrConfig()), model, rows, folder, algorithm.guide, algorithm.name)

A row of your own is another `Algorithm`: `replace(ALGORITHMS["sage-branch"], name="mine",
guide=BranchGuide(ratio=0.5))`.
"""

import difflib
import textwrap
from dataclasses import fields
from typing import Any

from sage_unsloth.figures import COLUMNS
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.training.algorithm import SETTINGS as SETTINGS
from sage_unsloth.training.algorithm import Algorithm as Algorithm
from sage_unsloth.training.algorithm_rows import ALGORITHMS as ALGORITHMS


def get_algorithm(name: str) -> Algorithm:
    """The row of `ALGORITHMS` of that name.

    Raises:
        ValueError: there is none; with the names, the nearest first.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), ALGORITHMS, n=1, cutoff=0.5)
    raise ValueError(
        f"an algorithm must be one of {', '.join(ALGORITHMS)}; got {name!r}"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def changes(algorithm: Algorithm, base: Algorithm = ALGORITHMS["grpo"]) -> dict[str, Any]:
    """The settings and the guide in which `algorithm` differs from `base`, with its values."""
    return {
        name: getattr(algorithm, name)
        for name in (*SETTINGS, "guide")
        if getattr(algorithm, name) != getattr(base, name)
    }


def listing() -> str:
    """Every algorithm on two lines: what it changes against grpo, and which gradient that is."""
    width = 2 + max(len(name) for name in ALGORITHMS)
    return "\n".join(
        textwrap.fill(
            text, COLUMNS, initial_indent=f"{start:{width}}", subsequent_indent=" " * width
        )
        for name, algorithm in ALGORITHMS.items()
        for start, text in ((name, _changes_text(algorithm)), ("", algorithm.description))
    )


def markdown_table() -> str:
    """All algorithms as a Markdown table."""
    what = "which gradient, or what it isolates"
    rows = [
        ("algorithm", "changes against grpo", what, "row of the paper"),
        ("---",) * 4,
        *(
            (f"`{name}`", _changes_text(row), row.description, row.paper_row or "none")
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
    """A dataclass guide's class and the fields that differ from the class's defaults."""
    given = [
        f"{field.name}={_guide_text(value) if isinstance(value, Guide) else repr(value)}"
        for field in fields(guide)
        if field.init and (value := getattr(guide, field.name)) != field.default
    ]
    return type(guide).__name__ + (f"({', '.join(given)})" if given else "")
