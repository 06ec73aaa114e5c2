"""Makes text from a model, a file or a hub safe for a terminal, Markdown or a file name."""

import logging
import os
import re
from collections.abc import Sequence

# A terminal obeys control characters (ESC and the C1 set); marks that turn the direction of writing
# change how the rest reads; halves of surrogate pairs cannot be written at all.
# (rich.control.strip_control_codes would not do: it leaves ESC and the C1 set in.)
_SYMBOLS = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
_SYMBOLS |= {0x7F: "␡"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)S?$", re.IGNORECASE)
_MARKDOWN = re.compile(r"[\\`*<>|&]|\](?=[(\[:])")


def printable(text: str) -> str:
    """The text with control characters as symbols; line breaks and tabs stay.

    Marks that change the direction of writing, and surrogates, become U+FFFD.
    """
    return _BIDI.sub("\ufffd", text.translate(_SYMBOLS))


def escape_markdown(text: str) -> str:
    """The text as one line of Markdown without active HTML, links, code or table cells."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(printable(text).split()))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def file_name(name: str) -> str:
    """A name for one file or folder: letters, digits, '.', '-' and '_' stay, all else becomes '-'.

    So does a leading dot: "../../x" becomes "-.-..-x".
    """
    return re.sub(r"[^\w.-]|^\.", "-", name) or "-"


def is_secret(variable: str) -> bool:
    """Whether an environment variable holds a secret, by its name."""
    return _SECRET.search(variable) is not None


def without_secrets(text: str) -> str:
    """The text with "***" for credentials in addresses and for values of secret variables.

    This package prints and records none itself, but errors of a hub's client may contain some.
    """
    for name, value in os.environ.items():
        if is_secret(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return re.sub(r"(?<=://)[^\s/@]+@", "***@", text)


class PrintableFormatter(logging.Formatter):
    """A log line, `printable` and without secrets, since it may quote a model or a hub."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


def log_to_terminal() -> None:
    """Shows the package's log on the terminal, unless logging is set up already."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("%(message)s"))
        logging.basicConfig(handlers=[handler])
