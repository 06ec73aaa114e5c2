"""Text that a model, a file or a hub wrote, made fit to be shown on a terminal, put into Markdown,
or used as a file's name.
"""

import logging
import os
import re

# A terminal obeys control characters (ESC and the C1 set); marks that turn the direction of writing
# change how the rest reads; halves of surrogate pairs cannot be written at all.
_SYMBOLS = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
_SYMBOLS |= {0x7F: "␡"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)S?$", re.IGNORECASE)
_MARKDOWN = re.compile(r"[\\`*<>|&]|\](?=[(\[:])")


def printable(text: str) -> str:
    """The text with control characters as their symbols; what turns the direction of writing, and
    surrogates, as U+FFFD.

    Line breaks and tabs stay.
    """
    return _BIDI.sub("\ufffd", text.translate(_SYMBOLS))


def markdown(text: str) -> str:
    """The text as one line of Markdown that shows it: no HTML, no link, no code and no table cell
    begins in it.
    """
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(printable(text).split()))


def file_name(name: str) -> str:
    """A name for one file or folder: letters, digits, '.', '-' and '_' stay, all else and a dot in
    front become '-'.

    So "../../x" is "-.-..-x", in the folder that was meant.
    """
    return re.sub(r"[^\w.-]|^\.", "-", name) or "-"


def without_secrets(text: str) -> str:
    """The text with credentials in addresses, and the values of variables that are named like
    secrets, as "***".

    Nothing of ours prints or records one; what a hub's client puts into an error is not ours.
    """
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return re.sub(r"(?<=://)[^\s/@]+@", "***@", text)


class PrintableFormatter(logging.Formatter):
    """A log line, `printable` and without secrets: what is logged may quote what a model or a hub
    said.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


def log_to_terminal() -> None:
    """What the package logs belongs on the screen, where nobody set up logging."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("%(message)s"))
        logging.basicConfig(handlers=[handler])
