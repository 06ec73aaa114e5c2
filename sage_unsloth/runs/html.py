"""Self-contained HTML pages: nothing is loaded or executed, and any text in them stays text.

The Content-Security-Policy forbids scripts and external content; light or dark follows the reader's
system.
"""

import html
from collections.abc import Iterable

from sage_unsloth.runs.text import printable

PAGE_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #ffffff; --card: #f5f5f2; --line:
  #c9c9c4; --faint: #595959; }
@media (prefers-color-scheme: dark) { :root { --text: #ececec; --page: #15171a; --card: #1f2227;
  --line: #43474e; --faint: #a9adb3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 70rem; color: var(--text); background:
  var(--page); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; } h3 { font-size: .85rem;
  margin: .8rem 0 .2rem; }
p, h3 { color: var(--faint); } .note { font-size: .85rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding:
  1rem; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; } th, td { border: 1px solid var(--line); padding:
  .4rem .6rem; text-align: left; vertical-align: top; font-size: .9rem; } td.text { font-family:
  ui-monospace, monospace; white-space: pre-wrap; }
.wide { overflow-x: auto; }
"""


def escape(text: str) -> str:
    """Text for any place in HTML, including attributes in double quotes; `printable`."""
    return html.escape(printable(text))


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """A whole page.

    Args:
        title: text, escaped here.
        body: HTML, with all its text escaped.
        style: additional CSS.
    """
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{PAGE_STYLE}{style}</style>\n</head>\n<body>",
            *filter(None, body),
            "</body>\n</html>\n",
        ]
    )
