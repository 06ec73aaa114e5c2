"""Short cells of a table (`.250 [.206, .294]`) stay on one line; the table scrolls instead."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONGEST = 26
"""Characters; an interval with its mean has 24."""


def mark(app: Sphinx, doctree: nodes.document) -> None:
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) <= LONGEST:
            cell["classes"].append("short")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
