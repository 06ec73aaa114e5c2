"""The names, parameters and versions of Unsloth that the patch relies on, and the error when they
are not so.
"""

import inspect
import sys
from typing import Any

from sage_unsloth.runs.record import package_version

TESTED_VERSIONS = ("2026.10.7", "2026.10.9")
"""Versions of unsloth (with the unsloth_zoo of the same number) that the tests have passed on."""
TESTED_TRL_VERSIONS = ("1.15.0", "1.16.0")
"""Versions of trl whose own trainer, without Unsloth, the tests have passed on."""

# Of the generated trainer's module.
LOSS = "grpo_accumulated_loss"
FUNCTION = "UnslothEfficientGRPO"
KERNEL = "grpo_compute_loss"
EXPECTED_PARAMETERS = {
    LOSS: ("trainer", "input_ids", "attention_mask", "logits_to_keep", "completion_mask",
           "advantages", "old_logps", "ref_logps"),
    FUNCTION: ("ctx", "_new_logps", "_old_logps", "_ref_logps", "_sampling_per_token_logps",
               "lm_head", "_input_ids", "_mask", "_advantages", "beta"),
    KERNEL: ("ref", "new", "old", "sampling_per_token_logps", "input_ids", "mask", "beta",
             "advantages"),
}  # fmt: skip
EXPECTED_ARGUMENTS = ("new_logprobs", "old_logps", "ref_logps", "sampling_per_token_logps",
                      "lm_head", "completion_input_ids", "completion_mask", "advantages",
                      "trainer.beta")  # fmt: skip
"""Of the call of `FUNCTION.apply` in `LOSS`."""

# What `LOSS` imports under this name scores log-probs and entropies.
SCORER = "_entropy_log_softmax"
SCORER_PARAMETERS = ("hidden_states", "lm_head", "index", "chunks", "logit_scale_multiply",
                     "logit_scale_divide", "logit_softcapping", "temperature")  # fmt: skip
SCORER_OPTIONS = {"max_rows_per_chunk", "lm_head_bias", "return_entropy", "fp32_lm_head"}

# Ours: what the rewritten source calls, put into the module while `guided_kl` is open.
NEEDS_ENTROPIES_HOOK = "_sage_unsloth_needs_entropies"
CALL_HOOK = "_sage_unsloth_apply"
KERNEL_HOOK = "_sage_unsloth_compute_loss"
SCORER_HOOK = "_sage_unsloth_scorer"

MISSING = (
    "Unsloth's trainer needs the package unsloth; it is not installed; pip install -e . (or pip "
    "install sage_unsloth), or train without it by TRL's own trainer: backend=trl"
)


class ContractError(RuntimeError):
    """The guided loss cannot be put in place, or was not consulted: Unsloth, or TRL where Unsloth
    is not imported, is not as tested, or is used in another way.
    """

    def __init__(self, rule: str, *, found: object, expected: object) -> None:
        installed = {
            name: package_version(name) or "not installed"
            for name in ("unsloth", "unsloth_zoo", "trl")
        }
        super().__init__(
            f"{rule}; found {found}, expected {expected}. Installed: "
            + ", ".join(f"{name} {version}" for name, version in installed.items())
            + f". Tested with {_remedy()}"
        )


def _remedy() -> str:
    if "unsloth" in sys.modules:
        return (
            f"unsloth and unsloth_zoo {' and '.join(TESTED_VERSIONS)}: install one "
            f'of these (pip install "unsloth=={TESTED_VERSIONS[0]}" '
            f'"unsloth_zoo=={TESTED_VERSIONS[0]}"), delete the folder unsloth_compiled_cache, and '
            "restart Python."
        )
    return (
        f"trl {' and '.join(TESTED_TRL_VERSIONS)}, without Unsloth: install one of these (pip "
        f'install "trl=={TESTED_TRL_VERSIONS[0]}"), or import unsloth before trl.'
    )


def check_scorer(scorer: Any) -> None:
    """Unsloth's scorer of log-probs and entropies must take what `scoring.scorer` passes on.

    Raises:
        ContractError: a parameter is missing, or in another place.
    """
    found = () if scorer is None else tuple(inspect.signature(scorer).parameters)
    expected = SCORER_PARAMETERS
    if found[: len(expected)] != expected or not set(found) >= SCORER_OPTIONS:
        raise ContractError(
            f"what is imported as {SCORER} must have these parameters",
            found=found,
            expected=(*expected, *sorted(SCORER_OPTIONS)),
        )
