"""The names, parameters and versions of Unsloth that the patch relies on, and the error when they
are not so.
"""

from sage_unsloth.runs.record import package_version

TESTED_VERSIONS = ("2026.10.7", "2026.10.9")
"""Versions of unsloth (with the unsloth_zoo of the same number) that the tests have passed on."""


LOSS = "grpo_accumulated_loss"


FUNCTION = "UnslothEfficientGRPO"


KERNEL = "grpo_compute_loss"


EXPECTED_PARAMETERS = {
    LOSS: ("trainer", "input_ids", "attention_mask", "logits_to_keep", "completion_mask", "advantages", "old_logps",
           "ref_logps"),
    FUNCTION: ("ctx", "_new_logps", "_old_logps", "_ref_logps", "_sampling_per_token_logps", "lm_head", "_input_ids",
               "_mask", "_advantages", "beta"),
    KERNEL: ("ref", "new", "old", "sampling_per_token_logps", "input_ids", "mask", "beta", "advantages"),
}  # fmt: skip


NEEDS_ENTROPIES_HOOK = "_sage_unsloth_needs_entropies"


CALL_HOOK = "_sage_unsloth_apply"


KERNEL_HOOK = "_sage_unsloth_compute_loss"


SCORER_HOOK = "_sage_unsloth_scorer"


SCORER = "_entropy_log_softmax"


SCORER_PARAMETERS = ("hidden_states", "lm_head", "index", "chunks", "logit_scale_multiply", "logit_scale_divide",
                     "logit_softcapping", "temperature")  # fmt: skip


SCORER_OPTIONS = {"max_rows_per_chunk", "lm_head_bias", "return_entropy", "fp32_lm_head"}


class ContractError(RuntimeError):
    """The guided loss cannot be put in place, or was not consulted: Unsloth is not as tested, or is
    used in another way.
    """

    def __init__(self, rule: str, *, found: object, expected: object) -> None:
        installed = {
            name: package_version(name) or "not installed"
            for name in ("unsloth", "unsloth_zoo", "trl")
        }
        super().__init__(
            f"{rule}; found {found}, expected {expected}. Installed: "
            + ", ".join(f"{name} {version}" for name, version in installed.items())
            + f". Tested with unsloth and unsloth_zoo {' and '.join(TESTED_VERSIONS)}: install "
            f"one of these "
            f'(pip install "unsloth=={TESTED_VERSIONS[0]}" "unsloth_zoo=={TESTED_VERSIONS[0]}"), '
            f"delete the folder "
            "unsloth_compiled_cache, and restart Python."
        )
