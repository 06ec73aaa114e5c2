"""The names, parameters and versions of Unsloth that the patch relies on, and the error when they
are not so.
"""

import sys

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

# Of unsloth_zoo.rl_replacements; the loss imports both, under these names, each time it is called.
ZOO = "unsloth_zoo.rl_replacements"
SCORER_WITH_ENTROPY = "chunked_hidden_states_selective_log_softmax_recompute"
SCORER = "_entropy_log_softmax"
SCORERS = (
    "chunked_hidden_states_selective_log_softmax",
    "grpo_chunked_hidden_states_logprobs",
    SCORER_WITH_ENTROPY,
)
"""What Unsloth scores hidden states with, by version and setting: 2026.10.7 has no second one."""
SCORER_PARAMETERS = ("hidden_states", "lm_head", "index", "chunks", "logit_scale_multiply",
                     "logit_scale_divide", "logit_softcapping", "temperature")  # fmt: skip
SCORER_OPTIONS = {"max_rows_per_chunk", "lm_head_bias", "return_entropy", "fp32_lm_head"}
ENTROPY_MASK = "grpo_high_entropy_mask"
"""Given the entropies wherever `ENTROPY_QUANTILE` is below 1; None masks nothing."""
ENTROPY_MASK_ARGUMENTS = ("trainer", "new_entropies.detach()", "completion_mask")
ENTROPY_QUANTILE = "top_entropy_quantile"
"""The setting of TRL's by which the loss decides whether to compute entropies."""

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
