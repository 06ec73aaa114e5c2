"""Docstrings are plain text with `code` in backticks; here they become reStructuredText.

Outside backticks, what reStructuredText would read as markup stands for itself (`β * x`, `|x|`,
`name_`), and a block that is indented below a blank line is code.
"""

import re
import textwrap
from typing import Any

from sphinx.application import Sphinx

MARKUP = r"(?P<emphasis>(?<!\S)\*\w+\*(?!\w))|\*|\||(?<=\w)_(?!\w)"
"""What reStructuredText would read as markup; an emphasised word is meant."""
SIGNATURE_LENGTH = 160
LONG_SIGNATURES: dict[str, str] = {}
"""Signatures that stand below the text of their object, by its name."""


def as_restructured_text(lines: list[str]) -> list[str]:
    """Lines of a docstring, for Sphinx."""
    found, code_indent = [], None
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if code_indent is not None and line.strip() and indent <= code_indent:
            code_indent = None
        if code_indent is not None:
            found.append(line)
            continue
        found.append(escaped(line))
        if introduces_code(lines, number, indent):
            code_indent = indent
            found += ["", " " * indent + "::"]
    return found


def introduces_code(lines: list[str], number: int, indent: int) -> bool:
    """Whether an indented block follows below a blank line."""
    rest = lines[number + 1 :]
    if not lines[number].strip() or len(rest) < 2 or rest[0].strip() or not rest[1].strip():
        return False
    return len(rest[1]) - len(rest[1].lstrip()) >= indent + 4


def escaped(line: str) -> str:
    """Backticks become literals, other markup stands for itself."""
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = part if part.startswith("``") else f"`{part}`"
        else:
            parts[i] = re.sub(MARKUP, lambda found: found["emphasis"] or "\\" + found[0], part)
            if i and re.match(r"\w", part):  # a literal ends only before a space: ``Finding``\ s
                parts[i] = rf"\ {parts[i]}"
    return "".join(parts)


def process(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)


def add_signature(
    app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]
) -> None:
    if signature := LONG_SIGNATURES.get(name):
        wrapped = textwrap.wrap(signature, 88, break_long_words=False, break_on_hyphens=False)
        lines += ["", "The parameters with their types and defaults::", ""]
        lines += [f"    {line}" for line in wrapped] + [""]


def join_names(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Attributes that share a line, `epsilon, epsilon_high`: Sphinx takes a word before a space for
    a type.
    """
    for number, line in enumerate(lines):
        if found := re.match(r":ivar (\w+(?:, \w+)+):", line):
            names = found[1].replace(", ", ",\u200b")
            lines[number] = f":ivar {names}:{line[found.end() :]}"


def shorten_signature(
    app: Sphinx, what: str, name: str, of: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """The default prompt by its name; a long signature goes below the text that explains it."""
    if signature is not None:
        signature = re.sub(
            r"PromptFormat\(system=.*?solution=\([^)]*\)\)", "PROJECT_PROMPT", signature
        )
        if len(signature) > SIGNATURE_LENGTH:
            full = signature + (f" -> {returns}" if returns else "")
            LONG_SIGNATURES[name] = re.sub(r"~(?:\w+\.)+", "", full)
            return "(…)", None
    return signature, returns


def setup(app: Sphinx) -> dict[str, Any]:
    # Before napoleon (500), which turns sections into fields with markup of their own.
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-docstring", join_names, priority=600)
    app.connect("autodoc-process-docstring", add_signature, priority=700)
    app.connect("autodoc-process-signature", shorten_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
