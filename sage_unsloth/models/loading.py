"""Loads a policy: with Unsloth's FastLanguageModel on a GPU, else with transformers and peft.

transformers and peft are also used for TRL's own trainer. Both take the same arguments and return a
model for Unsloth's trainers and a tokenizer with the chat template of its prompts. Adapters are
plain peft folders.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu, process_device, sixteen_bit_dtype
from sage_unsloth.models.embedded import locate_model
from sage_unsloth.models.lora import LORA_TARGETS as LORA_TARGETS
from sage_unsloth.models.lora import LoraSettings as LoraSettings
from sage_unsloth.models.quantised import (
    four_bit_config,
    keep_exact_products,
    refuse_quantising_again,
)
from sage_unsloth.models.templates import choose_format, choose_template
from sage_unsloth.models.tokenizers import load_stop_tokens, not_found_message, prepare_tokenizer
from sage_unsloth.models.weights import adapter_config, check_adapter_fits, refuse_pickles
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.trainers import switches
from sage_unsloth.trainers.backends import TRL, backend, load_backend
from sage_unsloth.trainers.loading import prepare_for_cpu


def load_policy(
    path: str | Path,
    *,
    lora: LoraSettings | None = None,
    adapter: str | Path | None = None,
    full_finetuning: bool = False,
    max_length: int = 2048,
    load_in_4bit: bool = False,
    use_vllm: bool = False,
    gpu_memory_utilization: float = 0.5,
    engine_arguments: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    seed: int = 3407,
    template: str | None = None,
    prompt: PromptFormat | None = None,
    tokenizer: Any = None,
) -> tuple[Any, Any]:
    """A model and its tokenizer, ready for Unsloth's trainers.

        load_policy(path)                       the model itself, for sampling
        load_policy(path, adapter=folder)       with a trained adapter, for sampling
        load_policy(path, lora=settings)        with a new adapter, to train it; its B is 0, so the
                                                policy starts as the model itself
        load_policy(path, lora=settings, adapter=folder)    with a trained adapter, to continue it
        load_policy(path, full_finetuning=True)             to train every weight

    Args:
        path: model folder, hub id, or "arithmetic-base", the embedded model.
        max_length: tokens of prompt and completion together; only Unsloth's GPU loader uses it.
        load_in_4bit: quantise the weights of the linear layers (`quantised`), which are frozen.
        use_vllm: sample rollouts with a vLLM engine that shares the weights (GPU only).
        gpu_memory_utilization: share of the GPU's memory for that engine, weights included.
        engine_arguments: further arguments of that engine.
        dtype: dtype of weights that are not quantised: "float32", "bfloat16" or "float16"; None
            uses float32 without a GPU, and Unsloth's choice on a GPU.
        seed: seed of the new adapter's A.
        template: one of `prompts.TEMPLATES`; None uses `templates.choose_template`.
        prompt: the prompt format; None uses `templates.choose_format`.
        tokenizer: from `load_tokenizer`, if already loaded; Unsloth's GPU loader loads its own.

    Raises:
        ValueError: full fine-tuning with an adapter, or in fewer than 32 bits; a model that must
            not be quantised again; vLLM without a GPU; an adapter of another shape or for another
            model; pickled weights; a tokenizer without EOS or a pad token; a missing model; a
            template or a prompt that the model was not trained with, or a template that it does not
            have.
    """
    if full_finetuning and (lora is not None or adapter is not None or load_in_4bit):
        raise ValueError("full_finetuning does not go with lora, adapter or load_in_4bit")
    if backend() == TRL and load_in_4bit:
        raise ValueError("load_in_4bit needs Unsloth's trainer, got backend='trl'")
    if not has_gpu() and use_vllm:
        raise ValueError("use_vllm needs a GPU, and this machine has none")
    path = locate_model(str(path))
    refuse_pickles(path)
    if load_in_4bit:
        refuse_quantising_again(path)
    if adapter is not None:
        check_adapter_fits(path, adapter)
        if lora is not None:
            _check_lora(adapter, lora)
    if load_backend(standby=use_vllm) == TRL:
        # Every weight is trained in float32: in bfloat16 alone, small steps are lost in rounding.
        sixteen = has_gpu() and not full_finetuning
        own, device = (sixteen_bit_dtype() if sixteen else "float32"), process_device()
        dtype = dtype or own
        model, tokenizer = _load_plain(
            path, lora, adapter, seed, tokenizer, dtype=dtype, device=device
        )
    elif has_gpu():
        import torch

        model, tokenizer = _load_on_gpu(
            path,
            lora,
            adapter,
            seed,
            max_seq_length=max_length,
            dtype=None if dtype is None else getattr(torch, dtype),
            load_in_4bit=load_in_4bit,
            full_finetuning=full_finetuning,
            # In bfloat16 alone, a step of 5e-6 is lost in rounding for most weights.
            float32_mixed_precision=True if full_finetuning else None,
            fast_inference=use_vllm,
            gpu_memory_utilization=gpu_memory_utilization,
            **(engine_arguments or {}),
        )
    else:
        model, tokenizer = _load_plain(
            path,
            lora,
            adapter,
            seed,
            tokenizer,
            dtype=dtype or "float32",
            device="cpu",
            load_in_4bit=load_in_4bit,
        )
        model = prepare_for_cpu(model)
    if lora is not None and adapter is not None:
        load_adapter_weights(model, Path(adapter))
    stops = load_stop_tokens(path, tokenizer)
    prompt = choose_format(path, prompt, adapter)
    choice = choose_template(path, tokenizer, stops, template, adapter, prompt)
    tokenizer = prepare_tokenizer(tokenizer, model.config, stops, path, choice.template, prompt)
    model.generation_config.eos_token_id = stops
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _load_on_gpu(
    path: str | Path,
    lora: LoraSettings | None,
    adapter: str | Path | None,
    seed: int,
    **options: Any,
) -> tuple[Any, Any]:
    """With Unsloth; `options` are those of its `from_pretrained`."""
    from unsloth import FastLanguageModel

    if options["fast_inference"]:
        switches.keep_vllm_memory_share()
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(path), max_lora_rank=lora.rank if lora is not None else 64, **options
    )
    if lora is not None:
        model = FastLanguageModel.get_peft_model(
            model,
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.targets),
            use_gradient_checkpointing="unsloth",
            random_state=seed,
        )
    elif adapter is not None:
        # By peft: Unsloth, given an adapter, would load the base that the adapter's config names
        # instead of `path`.
        from peft import PeftModel

        model = FastLanguageModel.for_inference(PeftModel.from_pretrained(model, str(adapter)))
    return model, tokenizer


def _load_plain(
    path: str | Path,
    lora: LoraSettings | None,
    adapter: str | Path | None,
    seed: int,
    tokenizer: Any,
    *,
    dtype: str,
    device: str,
    load_in_4bit: bool = False,
) -> tuple[Any, Any]:
    """With transformers and peft; adapters are in float32."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    numbers = getattr(torch, dtype)
    options = {"quantization_config": four_bit_config(numbers)} if load_in_4bit else {}
    try:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=numbers, use_safetensors=True, **options
        )
        if device != "cpu":
            model = model.to(device)
    except OSError as error:
        raise ValueError(not_found_message(path, error)) from error
    keep_exact_products(model)
    if lora is not None:
        torch.manual_seed(seed)  # of A
        model = get_peft_model(
            model,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(lora.targets),
                task_type="CAUSAL_LM",
            ),
        )
    elif adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    return model, tokenizer


def _check_lora(adapter: str | Path, lora: LoraSettings) -> None:
    """Raises ValueError for settings other than those of the trained adapter."""
    config = adapter_config(adapter)
    result = {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "targets": sorted(config["target_modules"]),
    }
    expected = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    if result != expected:
        raise ValueError(
            f"an adapter must be trained further with its own settings, but {adapter} has "
            f"{result}, asked for {expected}. Set lora to match"
        )


def load_adapter_weights(model: Any, adapter: Path) -> None:
    """Replaces a fresh adapter's weights by those of a trained one."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    result = set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
    if result.unexpected_keys:
        raise ValueError(
            f"every weight of an adapter must fit the model, but {len(result.unexpected_keys)} of "
            f"{adapter} do not, the first is {result.unexpected_keys[0]!r}. Give the model that it "
            "was trained on"
        )
