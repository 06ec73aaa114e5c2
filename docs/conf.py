"""The documentation site: `sphinx-build docs site`, then open `site/index.html`.

It needs no network, neither to build nor to read: formulas are MathML with a font of their own
in `_static`, and notebooks are shown with their committed outputs.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]

project = "sage_unsloth"
copyright = "2026, the sage_unsloth authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    # In docs/extensions:
    "api_pages",
    "docstrings",
    "mathml",
    "repository",
    "short_cells",
]
# A table that a page includes is no page of its own.
INCLUDED = (
    "tables/advantages.md",
    "tables/algorithms.md",
    "tables/cost.md",
    "tables/gpus.md",
    "tables/many-gpus.md",
    "tables/memory-count.md",
    "tables/plan.md",
    "tables/precision.md",
    "tables/python.md",
    "tables/theory.md",
    "tables/versions.md",
)
exclude_patterns = ["extensions", "_build", *INCLUDED]
templates_path = []

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
# Notebooks write progress to stderr.
nb_output_stderr = "remove"
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "sage_unsloth"
highlight_language = "none"
pygments_dark_style = "github-dark"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/sage-unsloth/sage_unsloth",
    "source_branch": "main",
    "source_directory": "docs/",
    "navigation_with_keys": True,
}
copybutton_prompt_text = "$ "
