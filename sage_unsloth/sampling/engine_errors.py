"""Errors of an engine, with the failed phase and a fix."""

import contextlib
from collections.abc import Iterator

ENGINE_PHASES = {
    "import": (
        "be imported",
        "Check the versions (python -m sage_unsloth doctor), or use --engine transformers",
    ),
    "start": (
        "start",
        "If memory ran out, end what else holds it, or use a smaller share "
        "(--engine-set gpu_memory_utilization=0.5) or --batch, or --engine transformers",
    ),
}
"""What an engine must do in each, and what to do where it fails. The calls are
`drawing.completions`'s, which keeps what was drawn."""


class EngineError(RuntimeError):
    """The engine failed; completions sampled before are on disk."""


@contextlib.contextmanager
def engine_errors(name: str, phase: str, *, refusals: bool = True) -> Iterator[None]:
    """Adds phase and fix to exceptions of an engine, which have classes of their own.

    Args:
        phase: one of `ENGINE_PHASES`.
        refusals: a ValueError inside is from this package and keeps its message.

    Raises:
        EngineError: with the error's class and message.
    """
    try:
        yield
    except Exception as error:
        if type(error) is EngineError or (refusals and type(error) is ValueError):
            raise
        raise _name_phase(name, phase, error) from error


def _name_phase(name: str, phase: str, error: Exception) -> EngineError:
    rule, remedy = ENGINE_PHASES[phase]
    return EngineError(
        f"the engine of {name} must {rule}, but failed: {type(error).__name__}: {error!s:.500}. "
        f"{remedy}"
    )
