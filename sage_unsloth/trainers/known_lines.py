"""Lines that Unsloth and what it imports write at every start, and that ask nothing of the reader.

Each is known to the letter; whatever else is written or logged passes.
"""

import contextlib
import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

KNOWN = (
    r"(🦥 )?Unsloth: Will patch your computer to enable 2x faster free finetuning\.",
    r"(🦥 )?Unsloth Zoo will now patch everything to make training faster!",
    # pip's wheels of xformers are built for another torch; PyTorch's attention computes the same.
    r"Unsloth: xformers is installed but cannot load with torch \S+( \(it was built for \S+\))?, "
    r"so PyTorch attention is used instead\.",
    r"To install a matching xformers, run `unsloth install-kernels xformers`, or `pip uninstall "
    r"xformers` to hide this\. UNSLOTH_ENABLE_LOGGING=1 shows the full error\.",
    # torchao registers two enumerations in an old way, for torch to warn of.
    r"<enum '(KernelPreference|ScaleCalculationMode)'> is an Enum subclass and is now natively "
    r"supported by torch\.compile as an opaque value type\. Calling register_constant\(\) on Enum "
    r"subclasses is deprecated and will be an error in a future release\.",
)
KNOWN_WITHOUT_GPU = (
    # A fused kernel for 4-bit weights on a CPU, which computes in bfloat16: `load_policy` keeps to
    # exact products.
    r"Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'\. "
    r"Please make sure you already `pip install kernels` and the kernels >= 0\.11\.1",
    # What a CPU trains in, as this package asks for.
    r"Unsloth: Model is in float32 and this GPU has no bfloat16 support, so training stays in "
    r"float32\. Pass fp16 = True to force float16 mixed precision instead\.",
)
LOGGERS = ("torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Whose records the logged ones of these lines are."""


@contextlib.contextmanager
def without_known_lines(*, gpu: bool) -> Iterator[None]:
    """Inside, the known lines are neither printed nor logged.

    Args:
        gpu: whether there is one; some lines mean nothing without it only.
    """
    known = re.compile("|".join(KNOWN if gpu else KNOWN + KNOWN_WITHOUT_GPU))

    def unknown(record: logging.LogRecord) -> bool:
        return known.fullmatch(record.getMessage()) is None

    loggers = [logging.getLogger(name) for name in LOGGERS]
    lines = _Lines(sys.stdout, known)
    for logger in loggers:
        logger.addFilter(unknown)
    try:
        with contextlib.redirect_stdout(lines):
            yield
    finally:
        lines.end()
        for logger in loggers:
            logger.removeFilter(unknown)


class _Lines(io.TextIOBase):
    """Passes text on to a stream line by line, without those that match `known`."""

    def __init__(self, stream: Any, known: re.Pattern[str]) -> None:
        self.stream, self.known, self.begun = stream, known, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            if self.known.fullmatch(line) is None:
                self.stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:
        return self.stream.encoding

    def end(self) -> None:
        """Passes on a last line without an end."""
        self.stream.write(self.begun)
        self.begun = ""
