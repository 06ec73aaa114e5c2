"""The table of checks: the function of each, its time limit and its requirements.

A new check is a function of a folder that yields `Finding`s, and a row here.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.sampling.engine_choice import why_no_vllm
from sage_unsloth.selftest.policy import half_precision, has_bfloat16

# Both of Unsloth's passes that leave padding out; the padded one is then what is tested.
PADDED = {"UNSLOTH_GRPO_SEQ_PACKING": "0", "UNSLOTH_GRPO_PREFIX_GROUPER": "0"}


def _nothing_needed() -> None:
    return None


def _no_gpu() -> str | None:
    return None if has_gpu() else "needs a GPU"


def _no_sleep() -> str | None:
    """Why vLLM cannot free its memory for training; on a CPU it has no separate memory."""
    return _no_gpu() or why_no_vllm()


def _no_bfloat16() -> str | None:
    if has_gpu() and not has_bfloat16():
        return "this GPU does not support bfloat16, so training uses float16"
    return None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One process of the self-test.

    Attributes:
        name: in the table, in `selftest.json` and for `pytest -m gpu -k`.
        function: "module:function": (folder, **arguments) → findings.
        seconds: time limit on a GPU; four times that elsewhere.
        missing: why it is not possible on this machine, or None.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: int = 90
    missing: Callable[[], str | None] = _nothing_needed
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """Time limit on this machine, seconds."""
        return self.seconds if has_gpu() else 4 * self.seconds


def _loss(number_format: str, ways: list[str], suffix: str = "", **settings: Any) -> Check:
    return Check(
        name=f"loss {number_format}{suffix}",
        function="sage_unsloth.selftest.losses:guided_loss",
        arguments={"number_format": number_format, "ways": ways},
        **settings,
    )


@functools.cache
def all_checks() -> tuple[Check, ...]:
    """The checks of this machine; those that the time may not suffice for come last."""
    gpu = has_gpu()
    half = half_precision() if gpu else "bfloat16"
    # On a GPU compiling takes seconds, and one process does for all ways; on a CPU it takes
    # minutes, and is a check of its own.
    ways = ["compiled", "eager", "shared prefix"] if gpu else ["eager"]
    checks = [
        Check(name="contract", function="sage_unsloth.selftest.stages:contract"),
        _loss("float32", ways),
        _loss("bfloat16", ways, missing=_no_bfloat16),
        _loss("float16", ways),
        _loss("4-bit", ways),
        _loss(half, ["compiled"], " padded", missing=_no_gpu, environment=PADDED),
        _loss("4-bit", ["compiled"], " padded", missing=_no_gpu, environment=PADDED),
        Check(name="cost and plan", function="sage_unsloth.selftest.costs:step_costs"),
        Check(name="resumed", function="sage_unsloth.selftest.stages:check_resume"),
        Check(name="export", function="sage_unsloth.selftest.stages:check_export"),
    ]
    for name, standby in (("vLLM", False), ("vLLM standby", True)):
        checks.append(
            Check(
                name=name,
                function="sage_unsloth.selftest.rollouts:vllm_rollouts",
                arguments={"standby": standby},
                seconds=180,
                missing=_no_sleep if standby else why_no_vllm,
            )
        )
    if not gpu:
        # Last: its time is the compiler's.
        compiled = {"UNSLOTH_COMPILE_DISABLE": "0"}
        checks.append(
            _loss("float32", ["compiled"], " compiled", environment=compiled, seconds=150)
        )
    return tuple(checks)
