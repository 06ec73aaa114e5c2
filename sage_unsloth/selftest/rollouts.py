"""Checks rollouts by vLLM in training.

vLLM reports the log-probability of each sampled token. The oracle scores the same texts with and
without the adapter: vLLM must be close to the first, or it samples from another model. The second
step shows that it follows the weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.sampling.engine_choice import check_calls
from sage_unsloth.selftest import policy
from sage_unsloth.selftest.decoder import decoder_of
from sage_unsloth.selftest.findings import PASSED, Finding
from sage_unsloth.selftest.oracle import score_batch, to_completion_layout

TRAIN_STEPS = 2
SHARE_OF_CARD = 0.3
TEST_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 24}
NEAR = 0.25
"""Limit of vLLM's mean distance from the policy, relative to that from the base model."""


def vllm_rollouts(folder: Path, standby: bool) -> Iterator[Finding]:
    """Two optimizer steps with completions by vLLM, with its memory kept or freed."""
    number_format = policy.half_precision()
    model, tokenizer = policy.load(
        policy.small_model(folder / "model"),
        number_format,
        fast_inference=True,
        gpu_memory_utilization=SHARE_OF_CARD,
        standby=standby,
    )
    trainer = policy.make_test_trainer(
        model,
        tokenizer,
        folder / "out",
        number_format,
        rollouts="vllm",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        max_completion_length=TEST_SAMPLING["max_tokens"],
        max_steps=TRAIN_STEPS,
        learning_rate=1e-2,
    )
    pad = tokenizer.pad_token_id
    # Raises if a call of the engine is told anything else.
    check_calls(trainer.vllm_generation.llm, TEST_SAMPLING | {"logit_bias": {pad: -100.0}})
    steps: list[dict[str, float]] = []
    changed = _train(trainer, pad, steps)
    name = "vLLM with standby" if standby else "vLLM"
    yield Finding(
        name=f"{name}, settings",
        status=PASSED,
        found=f"each call of {len(steps)} steps was told temperature, top-p, length, no pad token",
    )
    good = len(steps) == TRAIN_STEPS and all(s["policy"] <= NEAR * s["base"] for s in steps)
    yield Finding.of(
        good,
        name=f"{name}, log-probs",
        found=", ".join(
            f"step {i}: {s['policy']:.1e} nats from the policy, {s['base']:.1e} from the model "
            "without adapter"
            for i, s in enumerate(steps, 1)
        ),
        remedy="set rollouts=transformers. Send selftest.json",
        figures={"steps": steps},
    )
    good = changed == 0
    yield Finding.of(
        good,
        name=f"{name}, adapter",
        found="loading it into vLLM leaves it as it was"
        if good
        else f"loading it into vLLM changed it by {changed:.1e}",
        remedy="set rollouts=transformers. Send selftest.json",
        figures={"changed": changed},
    )


def _train(trainer: Any, pad: int, steps: list[dict[str, float]]) -> float:
    """Trains, records each batch's distances, and returns how far rollouts moved the adapter."""
    compute_loss, generate = trainer.compute_loss, trainer._generate
    changes = [0.0]

    def adapter() -> Tensor:
        lora = [p.detach().flatten() for n, p in trainer.model.named_parameters() if "lora_" in n]
        return torch.cat([p.float().cpu() for p in lora])

    def generate_and_compare(*args: Any, **kwargs: Any) -> Any:
        before = adapter()
        result = generate(*args, **kwargs)
        changes.append((adapter() - before).abs().max().item())
        return result

    def loss(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        steps.append(distances(trainer.model, inputs, pad))
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss, trainer._generate = loss, generate_and_compare
    with guided_kl(trainer, BranchGuide(**policy.GUIDE)):
        trainer.train()
    return max(changes)


def distances(model: Any, inputs: Mapping[str, Any], pad: int) -> dict[str, float]:
    """Mean |log-prob of the sampler − the oracle's| per token, nats: "policy" and "base".

    "base" is the model without the adapter.
    """
    decoder = decoder_of(model)
    batch = {k: v.cpu() if torch.is_tensor(v) else v for k, v in inputs.items()}
    mask = batch["completion_mask"].bool()
    sampled = batch["sampling_per_token_logps"]
    if sampled.shape == mask.shape:
        sampled = torch.where(mask, sampled.double(), 0.0)
    else:
        sampled = to_completion_layout(sampled, batch)
    matches = {}
    for name, adapted in (("policy", True), ("base", False)):

        def logits(ids: Tensor, adapted: bool = adapted) -> Tensor:
            result = decoder.logits(ids, adapted=adapted)
            return result.index_fill(1, torch.tensor([pad]), -1e4)  # as the sampler leaves it out

        with torch.no_grad():
            logps, _ = score_batch(logits, batch)
        matches[name] = ((sampled - logps).abs() * mask).sum().item() / mask.sum().item()
    return matches
