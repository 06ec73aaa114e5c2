"""Policy and trainer of the checks: random weights, an adapter that is not zero.

On a GPU Unsloth's FastLanguageModel loads each dtype; elsewhere transformers and peft do, as in
`models.loading`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.loading import LORA_TARGETS
from sage_unsloth.models.quantised import four_bit_config, keep_exact_products
from sage_unsloth.models.random_weights import save_random_model
from sage_unsloth.problems import arithmetic
from sage_unsloth.prompts import prompt_messages
from sage_unsloth.sampling.cpu_engine import start_beside
from sage_unsloth.sampling.engine_choice import generation_arguments
from sage_unsloth.trainers import switches
from sage_unsloth.trainers.loading import load_unsloth, prepare_for_cpu
from sage_unsloth.training.loss_scale import scale_losses

FORMATS = ("float32", "bfloat16", "float16", "4-bit")
RANK, LORA_ALPHA = 8, 16
ADAPTER_STD = 0.02  # of B: policy and reference then differ by about 0.1 nats a token
SEED = 3407
GUIDE = {"ratio": 0.6, "threshold": 3.2, "q_min": 0.6, "q_max": 2.0}
"""Arguments of `BranchGuide` and of the oracle's guide: stronger than the paper's, so that 16 bits
show it, and with a threshold near the small model's entropies."""


def has_bfloat16() -> bool:
    """Whether the GPU computes bfloat16 itself; PyTorch emulates it on a T4."""
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def half_precision() -> str:
    """The 16-bit dtype of training on this machine; float32 without a GPU."""
    if not has_gpu():
        return "float32"
    return "bfloat16" if has_bfloat16() else "float16"


def compute_format(number_format: str) -> str:
    """The dtype of products with such weights."""
    return half_precision() if number_format == "4-bit" else number_format


def small_model(folder: Path) -> Path:
    """Two layers of width 256; the entropy of its next token is about four nats."""
    if folder.exists():
        return folder
    return save_random_model(
        folder,
        256,
        num_layers=2,
        num_key_value_heads=2,
        head_std=0.12,
        initializer_range=0.04,
        max_position_embeddings=1024,
    )


def load(
    path: Path,
    number_format: str,
    *,
    adapter_std: float = ADAPTER_STD,
    max_length: int = 512,
    **options: Any,
) -> tuple[Any, Any]:
    """The model in one of `FORMATS` with an adapter whose B is noise, and its tokenizer.

    Args:
        adapter_std: standard deviation of B; 0 is a fresh adapter.
        max_length: prompt and completion together, tokens.
        options: of `FastLanguageModel.from_pretrained`.
    """
    import torch
    from transformers import AutoTokenizer

    load_unsloth(standby=options.pop("standby", False))
    dtype = getattr(torch, compute_format(number_format))
    in_4bit = number_format == "4-bit"
    if has_gpu():
        model = _load_by_unsloth(path, dtype, in_4bit, max_length, options)
    else:
        model = _load_by_transformers(path, dtype, in_4bit)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator) * adapter_std
            parameter.data.copy_(noise)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    if options.get("fast_inference") and not has_gpu():
        start_beside(model, path, max_length, RANK)
    return model, tokenizer


def _load_by_unsloth(path: Path, dtype: Any, in_4bit: bool, max_length: int, options: dict) -> Any:
    from unsloth import FastLanguageModel

    if options.get("fast_inference"):
        switches.keep_vllm_memory_share()
    model, _ = FastLanguageModel.from_pretrained(
        str(path),
        max_seq_length=max_length,
        dtype=dtype,
        load_in_4bit=in_4bit,
        max_lora_rank=RANK,
        **options,
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        target_modules=list(LORA_TARGETS),
        use_gradient_checkpointing="unsloth",
        random_state=SEED,
    )


def _load_by_transformers(path: Path, dtype: Any, in_4bit: bool) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if in_4bit:
        options["quantization_config"] = four_bit_config(dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True, **options)
    keep_exact_products(model)
    torch.manual_seed(SEED)  # of A
    lora = LoraConfig(
        r=RANK, lora_alpha=LORA_ALPHA, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"
    )
    return prepare_for_cpu(get_peft_model(model, lora))


def make_test_trainer(
    model: Any,
    tokenizer: Any,
    folder: Path,
    number_format: str,
    *,
    rewards: Callable[..., list[float]] | None = None,
    rollouts: str = "transformers",
    **settings: Any,
) -> Any:
    """Unsloth's generated trainer on arithmetic prompts, with eight completions each.

    Args:
        number_format: of the loaded model, one of `FORMATS`.
        rewards: TRL's reward function; None takes `token_sum_rewards`.
        rollouts: "transformers" or "vllm".
        settings: of GRPOConfig.
    """
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    generated: Any = trl
    computed = compute_format(number_format)
    if computed == "float32" and has_gpu():
        switches.train_in_float32()
    arguments: dict[str, Any] = dict(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=8,
        gradient_accumulation_steps=1,
        max_steps=1,
        max_completion_length=24,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        beta=0.5,
        loss_type="grpo",
        use_bias_correction_kl=False,
        learning_rate=0.0,
        weight_decay=0.0,
        optim="adamw_torch",
        lr_scheduler_type="constant",
        use_cpu=not has_gpu(),
        bf16=computed == "bfloat16",
        fp16=computed == "float16",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=has_gpu(),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=SEED,
        max_grad_norm=1e9,  # no clipping, but the gradients of float16 are unscaled for it
        generation_kwargs=generation_arguments(rollouts, tokenizer.pad_token_id),
    )
    rows = [{"prompt": prompt_messages(r["problem"])} for r in arithmetic.problems("train")[:64]]
    trainer = generated.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[rewards or token_sum_rewards],
        args=generated.GRPOConfig(**(arguments | settings)),
        train_dataset=Dataset.from_list(rows),
    )
    scale_losses(trainer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def token_sum_rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A free reward that differs in a group: the sum of a completion's ids, mod 5."""
    return [float(sum(ids) % 5) for ids in completion_ids]
