"""Writes a page of the API for each room, from the names that its `__init__.pyi` makes public."""

import ast
from pathlib import Path
from typing import Any

from docstrings import as_restructured_text
from sphinx.application import Sphinx

PACKAGE = Path(__file__).parents[2] / "sage_unsloth"
MODULES = ("prompts", "front", "figures")
"""Modules outside the rooms whose names are public."""


def rooms() -> list[str]:
    """Sub-packages with public names."""
    return sorted(stub.parent.name for stub in PACKAGE.glob("*/__init__.pyi"))


def public_names(stub: Path) -> dict[str, str]:
    """The names of a stub's `__all__`, each with the module that it is imported from ("" if the
    stub declares it).
    """
    origin, names = {}, []
    for statement in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            origin |= {alias.name: statement.module or "" for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            names = [element.value for element in statement.value.elts]  # pyright: ignore
    return {name: origin.get(name, "") for name in names}


def summary(room: str, name: str) -> str:
    """The first paragraph of a public class's or function's docstring."""
    file = PACKAGE / f"{room}.py"
    if not file.exists():
        file = PACKAGE / room / f"{public_names(PACKAGE / room / '__init__.pyi')[name]}.py"
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = next(node for node in body if isinstance(node, kinds) and node.name == name)
    text = " ".join((ast.get_docstring(found) or "").partition("\n\n")[0].split())
    return text.rstrip(".:").replace("|", "\\|")


def constants(room: str) -> dict[str, str]:
    """The public tables of a room (`ALGORITHMS`), each with the text below it in its module."""
    found = {}
    for name, module in public_names(PACKAGE / room / "__init__.pyi").items():
        if not (module and name.isupper()):
            continue
        body = ast.parse((PACKAGE / room / f"{module}.py").read_text(encoding="utf-8")).body
        for statement, below in zip(body, [*body[1:], None], strict=True):
            if name in assigned(statement):
                text = getattr(getattr(below, "value", None), "value", "")
                found[name] = text if isinstance(text, str) else ""
    return found


def assigned(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value."""
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def room_page(name: str) -> str:
    """The page of a room or module."""
    # Docstrings are reStructuredText by the time they are read (docstrings.py).
    lines = [f".. automodule:: sage_unsloth.{name}", "   :members:", ""]
    # Autodoc looks for the text below a constant in the module that it is asked for.
    tables = constants(name) if (PACKAGE / name).is_dir() else {}
    for constant, text in tables.items():
        lines += [f".. py:data:: {constant}", f"   :module: sage_unsloth.{name}", ""]
        lines += [f"   {line}" for line in as_restructured_text(text.splitlines())] + [""]
    directives = "\n".join(lines)
    return f"# sage_unsloth.{name}\n\n```{{eval-rst}}\n{directives}```\n"


def pages() -> dict[str, str]:
    """The text of each page by its name; `root` is that of the package itself."""
    rows = []
    for name, room in public_names(PACKAGE / "__init__.pyi").items():
        page = room.split(".")[0]
        if page:
            cell = f"{{py:obj}}`{name} <sage_unsloth.{page}.{name}>`"
            rows.append(f"| {cell} | {summary(page, name)} | [{page}]({page}.md) |")
        else:
            rows.append(f"| `{name}` | the version of this package, a text | |")
    intro = "The names that most need, `from sage_unsloth import …`. Each is described in its room."
    table = "\n".join(["| name | what it is | room |", "|---|---|---|", *rows])
    root = {"root": f"# sage_unsloth\n\n{intro}\n\n{table}\n"}
    return root | {name: room_page(name) for name in [*rooms(), *MODULES]}


def write(app: Sphinx) -> None:
    for name, text in pages().items():
        path = Path(app.srcdir, "api", f"{name}.md")
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
