"""Identifiers say what a thing is: words that fit everything are rare in the code."""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sage_unsloth"
RETIRED = {"found", "one", "wanted", "kept", "asked", "told"}
MOST = 1.0
"""Of them in a thousand lines."""


def identifiers(source: str) -> list[str]:
    """Every name that is read, bound or taken as a parameter."""
    nodes = ast.walk(ast.parse(source))
    return [node.arg if isinstance(node, ast.arg) else node.id for node in nodes
            if isinstance(node, ast.arg | ast.Name)]  # fmt: skip


@pytest.mark.smoke
def test_words_that_fit_everything_are_rare():
    counts, num_lines = Counter(), 0
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        num_lines += source.count("\n")
        retired = sum(name in RETIRED for name in identifiers(source))
        counts[path.relative_to(PACKAGE).as_posix()] = retired
    worst = {name: count for name, count in counts.most_common(8) if count}
    assert counts.total() / num_lines * 1000 <= MOST, f"{counts.total()} in {num_lines}: {worst}"


def test_parameters_and_names_are_counted():
    source = "def f(found, *, key):\n    return [one for one in found]\n"
    assert Counter(identifiers(source)) == {"found": 2, "one": 2, "key": 1}
