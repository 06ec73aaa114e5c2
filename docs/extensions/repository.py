"""What the site shows of the repository outside `docs/`: notebooks, changelog, other files.

Pages link to files as GitHub shows them (`../notebooks/05_theory.ipynb`, `../data/results`). Here
notebooks lead to their page of the site, and all other files to the repository on the web. An image
from another server, such as a badge, becomes its text: the site loads nothing from elsewhere.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BROWSE = "https://github.com/sage-unsloth/sage_unsloth/{}/main/{}"
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\(([^)\s]+)\)")


def on_the_site(text: str, file: Path, page: Path) -> str:
    """The text of `file`, its links rewritten for the page that shows it."""

    def target(link: str, is_image: bool) -> str:
        if re.match(r"[a-z]+:|#", link):
            return link
        path, _, heading = link.partition("#")
        absolute = (file.parent / path).resolve()
        name = absolute.relative_to(ROOT).as_posix()
        heading = f"#{heading}" if heading else ""
        if name in PAGES:
            absolute = DOCS / PAGES[name]
        elif name.startswith("notebooks/") and name.endswith(".ipynb"):
            absolute = DOCS / "tutorials" / absolute.name
        elif not is_image and not absolute.is_relative_to(DOCS):
            return BROWSE.format("tree" if absolute.is_dir() else "blob", name) + heading
        return Path(os.path.relpath(absolute, page.parent)).as_posix() + heading

    def rewritten(found: re.Match[str]) -> str:
        image, label, link = found.groups()
        if image and link.startswith("https:"):
            return label
        label = LINK.sub(rewritten, label)
        return f"{image}[{label}]({target(link, bool(image))})"

    return LINK.sub(rewritten, text)


def read_page(app: Sphinx, docname: str, content: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".md":
        content[0] = on_the_site(content[0], path, path)


def read_included(app: Sphinx, file: Path, docname: str, content: list[str]) -> None:
    path = Path(os.path.normpath(DOCS / file))
    content[0] = on_the_site(content[0], path, Path(app.env.doc2path(docname)))


def show_notebooks(app: Sphinx) -> None:
    """Copies the notebooks, with their outputs, to `docs/tutorials/`."""
    folder = DOCS / "tutorials"
    folder.mkdir(exist_ok=True)
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shown = json.loads(notebook.read_text(encoding="utf-8"))
        page = folder / notebook.name
        for cell in shown["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = on_the_site("".join(cell["source"]), notebook, page)
        text = json.dumps(shown)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", show_notebooks)
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
