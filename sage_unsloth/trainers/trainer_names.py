"""The private names of Unsloth and TRL that this package uses, and their tested versions."""

import sys
from typing import Any

from sage_unsloth.runs.record import package_version

TESTED_VERSIONS = ("2026.10.7", "2026.10.9")
"""Tested versions of unsloth, with the unsloth_zoo of the same number."""
TESTED_TRL_VERSIONS = ("1.15.0", "1.16.0")
"""Tested versions of trl for its own trainer, without Unsloth."""

# Methods of both trainers.
ROLLOUT = "_generate_and_score_completions"
GENERATE = "_generate"
REWARDS = "_calculate_rewards"
SCORE = "_get_per_token_logps_and_entropies"
SAMPLER = "_get_train_sampler"
COMPUTE_LOSS = "compute_loss"
STEP = "training_step"
# Their attributes.
METRICS_ATTRIBUTE = "_metrics"
"""Lists of values by mode ("train", "eval") and name; averaged and emptied at each log."""
TABLE = "_logs"
"""Data of the table of completions."""
EXTRA_LOGS = "_pending_extra_logs"
BUFFER = "_buffered_inputs"
"""Micro-batches of a rollout batch that are still to be trained on."""
TOKENIZER = "_tokenizer"

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
"""Unsloth's scorers of hidden states, by version and setting: 2026.10.7 has no second one."""
SCORER_PARAMETERS = ("hidden_states", "lm_head", "index", "chunks", "logit_scale_multiply",
                     "logit_scale_divide", "logit_softcapping", "temperature")  # fmt: skip
SCORER_OPTIONS = {"max_rows_per_chunk", "lm_head_bias", "return_entropy", "fp32_lm_head"}
ENTROPY_MASK = "grpo_high_entropy_mask"
"""Gets the entropies if `ENTROPY_QUANTILE` is below 1; None masks nothing."""
ENTROPY_MASK_ARGUMENTS = ("trainer", "new_entropies.detach()", "completion_mask")
ENTROPY_QUANTILE = "top_entropy_quantile"
"""TRL's setting by which the loss decides whether to compute entropies."""

OF_LOGITS = "chunked_selective_log_softmax"
"""Of the same module: scores logits if a model returns them."""
ENGINE_LORA = "_unsloth_load_lora"
"""Of TRL's `VLLMGeneration`: set if Unsloth gives its engine the live adapter."""
LORA_REQUEST = "_build_lora_request"
"""Of unsloth_zoo.vllm_utils."""
LORA_REQUEST_PARAMETERS = ("model", "save_directory", "load_tensors", "lora_request_id")

# Of TRL's own trainer.
TRL_TRAINER = ("trl.trainer.grpo_trainer", "GRPOTrainer")
TRL_LOSS = "_compute_loss"
TRL_LOSS_PARAMETERS = ("self", "model", "inputs")
SCORE_PARAMETERS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep",
                    "batch_size", "compute_entropy")  # fmt: skip
REFERENCE_ADAPTER = "ref"
"""TRL's copy of an initial adapter, with which it scores π_ref."""
PENALTY = "per_token_kl"
TRL_PENALTY = (
    "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
)
# Of trl.trainer.utils.
FUSED_HEAD = "add_fused_lm_head"
FUSED_HEAD_PARAMETERS = ("model", "temperature", "cast_lm_head_to_fp32", "outputs")
HEAD_KERNEL = "_ChunkedLogProbFunction"
"""Autograd function of the fused head."""
HEAD_CHOICE = "_use_triton"
"""From TRL 1.16 on: it chooses by the device."""

UNSLOTH_MISSING = (
    "Unsloth's trainer needs the package unsloth, which is not installed (pip install "
    "sage_unsloth). Or use TRL's own trainer without it: backend=trl"
)


def metrics_of(trainer: Any, mode: str) -> Any:
    """The lists whose means the trainer logs, by name."""
    return getattr(trainer, METRICS_ATTRIBUTE)[mode]


class ContractError(RuntimeError):
    """The guided loss cannot be installed, or was not called: the trainer is not as tested."""

    def __init__(self, rule: str, *, actual: object, expected: object) -> None:
        installed = {
            name: package_version(name) or "not installed"
            for name in ("unsloth", "unsloth_zoo", "trl")
        }
        super().__init__(
            f"{rule}, got {actual}, expected {expected}. Installed: "
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
