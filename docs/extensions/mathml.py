"""Formulas as MathML, by docutils' own converter: no script and no network is needed."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def formula(node: nodes.math | nodes.math_block, *, as_block: bool) -> str:
    """A formula of LaTeX as MathML.

    Raises:
        ValueError: the converter does not know a command of it.
    """
    try:
        mathml = tex2mathml(node.astext().strip(), as_block=as_block)
    except MathError as error:
        raise ValueError(
            f"a formula must use LaTeX that docutils converts to MathML; {error} in "
            f"{node.astext()!r}"
        ) from error
    # A bar between two terms would grow with the tallest bracket of its line.
    return re.sub(r"<mo>([‖∥∣|])</mo>", r'<mo stretchy="false">\1</mo>', mathml)


def visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(f'<span class="math">{formula(node, as_block=False)}</span>')
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{formula(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
