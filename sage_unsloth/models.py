"""Loads a policy for training or sampling: Unsloth's FastLanguageModel on a GPU, transformers + peft without one.

Both ways take the same arguments and return a model that Unsloth's trainers accept and a tokenizer that carries the
project's chat template. Adapters are plain peft folders either way.
"""

import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.patch import load_unsloth, prepare_for_cpu
from sage_unsloth.prompts import CHAT_TEMPLATE
from sage_unsloth.records import whole_folder
from sage_unsloth.weights import adapter_config, check_adapter, refuse_pickles

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PAD_TOKEN = "<|pad|>"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapter of both training stages (Tables 7 and 8).

    Attributes:
        rank: r.
        alpha: the adapter is scaled by alpha / r.
        dropout: probability.
        targets: names of the linear layers that get one.
    """

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = field(default=LORA_TARGETS)

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1 or not self.targets:
            raise ValueError(
                "rank must be >= 1, alpha > 0, dropout in [0, 1) and targets not empty; got "
                f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}, targets={self.targets}"
            )


def data_folder() -> Path:
    """The project's data: beside the code in an installed package, beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    return here / "data" if (here / "data").is_dir() else here.parent / "data"


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder or hub id, with the project's chat template and a pad token of its own.

    Raises:
        ValueError: it cannot be loaded, it has no EOS token, or no token can serve as pad.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        config = AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(_not_found(path, error)) from error
    return prepare_tokenizer(tokenizer, config, load_stop_tokens(path, tokenizer), path)


def load_stop_tokens(path: str | Path, tokenizer: Any) -> list[int]:
    """The tokens that end a completion of the model at `path`: EOS, and what its generation_config adds."""
    from transformers import GenerationConfig

    try:
        return stop_tokens(GenerationConfig.from_pretrained(path), tokenizer)
    except OSError:  # a model need not have one
        return stop_tokens(None, tokenizer)


def stop_tokens(generation: Any, tokenizer: Any) -> list[int]:
    """As the trainer has them: the `eos_token_id` of a generation config, one or several, and the tokenizer's."""
    found = getattr(generation, "eos_token_id", None)
    found = found if isinstance(found, list) else [found]
    return sorted({*found, tokenizer.eos_token_id} - {None})


def _not_found(path: str | Path, error: Exception) -> str:
    return (
        f"a model must be a folder or a hub id that can be reached; {str(path)!r} could not be loaded: {error!s:.300}; "
        "check the path or the network"
    )


def prepare_tokenizer(tokenizer: Any, config: Any, stops: list[int], path: str | Path) -> Any:
    """The tokenizer with our chat template, padding on the left, and a pad token that ends no completion.

    Unsloth tells a completion from padding by the pad id alone. So where pad is missing, or is one of the tokens that
    generation stops at, an unused special token takes its place.

    Raises:
        ValueError: no EOS token, or no token can serve as pad.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer must have an EOS token because the chat template ends each turn with it; got None in "
            f"{path}; set tokenizer.eos_token and save it"
        )
    tokenizer.padding_side = "left"
    tokenizer.chat_template = CHAT_TEMPLATE
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stops:
        before = tokenizer.pad_token
        rows = config.get_text_config().vocab_size
        tokenizer.pad_token = _unused_token(tokenizer, stops, rows, path)
        logger.info("Pad token of %s: %r instead of %r.", path, tokenizer.pad_token, before)
    return tokenizer


def _unused_token(tokenizer: Any, stops: list[int], rows: int, path: str | Path) -> str:
    """A special token made for padding or reserved for nothing; else a new one, where the embedding has a spare row."""
    special = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number not in stops and number < rows
    }
    for word in ("pad", "reserved", "unused"):
        for content in special:
            if word in content.lower() and content != tokenizer.bos_token:
                return content
    if len(tokenizer) < rows:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
        return PAD_TOKEN
    raise ValueError(
        "the tokenizer must have a token to pad with that is not EOS, because Unsloth finds the end of a completion by it; "
        f"got pad_token={tokenizer.pad_token!r}, eos_token={tokenizer.eos_token!r} in {path}, no reserved token, and no spare "
        f"row among the embedding's {rows}; enlarge the embedding by one row and save model and tokenizer"
    )


def release_memory() -> None:
    """Free the models that nothing refers to: they hold themselves in cycles, which only the collector breaks."""
    import gc

    gc.collect()
    if has_gpu():
        import torch

        torch.cuda.empty_cache()


def has_gpu() -> bool:
    """Whether training and sampling run on a CUDA device."""
    import torch

    return torch.cuda.is_available()


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
    seed: int = 3407,
) -> tuple[Any, Any]:
    """A model and its tokenizer, ready for Unsloth's trainers.

        load_policy(path)                       the model itself, for sampling
        load_policy(path, adapter=folder)       with a trained adapter, for sampling
        load_policy(path, lora=settings)        with a fresh adapter (B = 0), to train: the policy starts as the model itself
        load_policy(path, lora=settings, adapter=folder)    with the trained adapter, to train on
        load_policy(path, full_finetuning=True)             to train every weight

    Args:
        path: model folder or hub id.
        lora, adapter, full_finetuning: see above.
        max_length: prompt and completion together, tokens; only Unsloth's GPU loader uses it.
        load_in_4bit: quantise the weights (GPU only).
        use_vllm: rollouts by the vLLM engine that shares the weights (GPU only); see `rollouts.choose_rollouts`.
        gpu_memory_utilization: share of the card's memory that the engine takes, weights included.
        seed: of the fresh adapter's A.

    Raises:
        ValueError: full fine-tuning with an adapter or in 4 bit; 4-bit or vLLM without a GPU; an adapter of another shape or for
            another model; weights in pickles; a tokenizer without EOS or a token to pad with; a model that cannot be found.
    """
    if full_finetuning and (lora is not None or adapter is not None or load_in_4bit):
        raise ValueError(
            "full_finetuning trains the weights themselves, in 16 bit or more; got lora, adapter or load_in_4bit as well; "
            "leave these out, or full_finetuning"
        )
    if not has_gpu() and load_in_4bit:
        raise ValueError(
            "load_in_4bit needs a GPU because bitsandbytes quantises there; got none; leave it off"
        )
    if not has_gpu() and use_vllm:
        raise ValueError("use_vllm needs a GPU; got none; leave it off")
    refuse_pickles(path)
    if adapter is not None:
        check_adapter(path, adapter)
        if lora is not None:
            _check_lora(adapter, lora)
    load_unsloth(standby=use_vllm)
    if not has_gpu():
        model, tokenizer = _load_on_cpu(path, lora, adapter, seed)
    else:
        from unsloth import FastLanguageModel

        if use_vllm:
            # Else standby puts a share of its own in the place of the one asked for.
            os.environ["UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"] = "1"
        model, tokenizer = FastLanguageModel.from_pretrained(
            str(path),
            max_seq_length=max_length,
            load_in_4bit=load_in_4bit,
            full_finetuning=full_finetuning,
            # In bfloat16 alone, a step of 5e-6 is lost in rounding for most weights.
            float32_mixed_precision=True if full_finetuning else None,
            fast_inference=use_vllm,
            gpu_memory_utilization=gpu_memory_utilization,
            max_lora_rank=lora.rank if lora is not None else 64,
        )
        if lora is not None:
            model = FastLanguageModel.get_peft_model(
                model, r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets),
                use_gradient_checkpointing="unsloth", random_state=seed,
            )  # fmt: skip
        elif adapter is not None:
            # By peft: Unsloth, given an adapter, would load the base that the adapter's config names instead of `path`.
            from peft import PeftModel

            model = FastLanguageModel.for_inference(PeftModel.from_pretrained(model, str(adapter)))
    if lora is not None and adapter is not None:
        _load_adapter_weights(model, Path(adapter))
    stops = load_stop_tokens(path, tokenizer)
    tokenizer = prepare_tokenizer(tokenizer, model.config, stops, path)
    model.generation_config.eos_token_id = stops
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _load_on_cpu(
    path: str | Path, lora: LoraSettings | None, adapter: str | Path | None, seed: int
) -> tuple[Any, Any]:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True
        )
    except OSError as error:
        raise ValueError(_not_found(path, error)) from error
    if lora is not None:
        torch.manual_seed(seed)
        model = get_peft_model(
            model,
            LoraConfig(
                r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets),
                task_type="CAUSAL_LM",
            ),
        )  # fmt: skip
    elif adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    return prepare_for_cpu(model), tokenizer


def _check_lora(adapter: str | Path, lora: LoraSettings) -> None:
    """Training goes on with an adapter as it was made."""
    found = adapter_config(adapter)
    there = {"rank": found["r"], "alpha": found["lora_alpha"], "targets": sorted(found["target_modules"])}  # fmt: skip
    wanted = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    if there != wanted:
        raise ValueError(
            f"training goes on with an adapter of the same settings only; {adapter} has {there}, asked for {wanted}; set lora "
            "to match"
        )


def _load_adapter_weights(model: Any, adapter: Path) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    result = set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
    if result.unexpected_keys:
        raise ValueError(
            f"every weight of an adapter must have its place in the model; {adapter} has {len(result.unexpected_keys)} that "
            f"have not, the first is {result.unexpected_keys[0]!r}; give the model that it was trained on"
        )


def save_merged(
    model: Any, tokenizer: Any, folder: str | Path, *, dtype: str | None = None
) -> None:
    """Merge the adapter into its base and save an ordinary model folder, complete or not at all.

    The folder appears under its name only when every file is in it. Unsloth is given an absolute path: on Kaggle it moves a
    relative one that does not fit to /tmp, and says so only in print.

    Args:
        model: with an adapter, or fully trained.
        dtype: of the weights without a GPU ("bfloat16"); None keeps the model's. On a GPU they have 16 bits.

    Raises:
        OSError: the disk is too small, or the writer left no model in the folder.
    """
    from peft import PeftModel

    folder = Path(folder).absolute()
    with whole_folder(folder) as partial:
        bytes_per_weight = 2 if has_gpu() or dtype in ("bfloat16", "float16") else 4
        needed, free = (
            model.num_parameters() * bytes_per_weight,
            shutil.disk_usage(folder.parent).free,
        )
        if free < needed:
            raise OSError(
                f"the merged model needs {needed / 2**30:.1f} GiB; {folder.parent} has {free / 2**30:.1f} GiB free; free some, or "
                "choose a folder on another disk"
            )
        if has_gpu():
            from unsloth.save import patch_saving_functions

            # An adapter that peft loaded has only its base's saving functions, which refuse.
            patch_saving_functions(model)
            # None pins safetensors; True lets Unsloth write a pickle on machines with one or two CPUs.
            model.save_pretrained_merged(str(partial), tokenizer, save_method="merged_16bit", safe_serialization=None)  # fmt: skip
        else:
            merged = model.merge_and_unload() if isinstance(model, PeftModel) else model
            if dtype is not None:
                import torch

                merged = merged.to(getattr(torch, dtype))
            merged.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        if not (partial / "config.json").exists() or not list(partial.glob("*.safetensors")):
            raise OSError(
                f"a saved model must have config.json and *.safetensors; {partial} has neither or one of them: Unsloth has put it "
                "elsewhere (its last lines say where); set UNSLOTH_KAGGLE_USE_TMP=0, free disk space, and try again"
            )
