"""Loads a policy for training or sampling: Unsloth's FastLanguageModel on a GPU, transformers + peft without one.

Both ways take the same arguments and return a model that Unsloth's trainers accept and a tokenizer that carries the
project's chat template. Adapters are plain peft folders either way.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.patch import load_unsloth, prepare_for_cpu
from sage_unsloth.prompts import CHAT_TEMPLATE

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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


def data_folder() -> Path:
    """The project's data: beside the code in an installed package, beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    return here / "data" if (here / "data").is_dir() else here.parent / "data"


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder or hub id, with the project's chat template.

    Raises:
        ValueError: it has no pad token, or the pad token is the EOS token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    return _checked(tokenizer, path)


def _checked(tokenizer: Any, path: str | Path) -> Any:
    """The tokenizer with our chat template; Unsloth tells completions from padding by the pad id alone."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ValueError(
            "the tokenizer must have a pad token of its own because Unsloth finds the end of a completion by it; "
            f"got pad_token={tokenizer.pad_token!r}, eos_token={tokenizer.eos_token!r} in {path}; "
            "set tokenizer.pad_token to a reserved token and save the tokenizer"
        )
    tokenizer.padding_side = "left"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def has_gpu() -> bool:
    """Whether training and sampling run on a CUDA device."""
    import torch

    return torch.cuda.is_available()


def load_policy(
    path: str | Path,
    *,
    lora: LoraSettings | None = None,
    adapter: str | Path | None = None,
    max_length: int = 2048,
    load_in_4bit: bool = False,
    seed: int = 3407,
) -> tuple[Any, Any]:
    """A model and its tokenizer, ready for Unsloth's trainers.

    Args:
        path: model folder or hub id.
        lora: put a fresh adapter on it (B = 0, so the policy starts as the model itself).
        adapter: or load this trained adapter, for sampling.
        max_length: prompt and completion together, tokens; only Unsloth's GPU loader uses it.
        load_in_4bit: quantise the weights (GPU only).
        seed: of the fresh adapter's A.

    Raises:
        ValueError: both `lora` and `adapter`, 4-bit without a GPU, or a tokenizer without a pad token of its own.
    """
    if lora is not None and adapter is not None:
        raise ValueError("give either lora (a fresh adapter) or adapter (a trained one); got both")
    if not has_gpu():
        if load_in_4bit:
            raise ValueError(
                "load_in_4bit needs a GPU because bitsandbytes quantises there; got none; leave it off"
            )
        return _load_on_cpu(path, lora, adapter, seed)
    load_unsloth()
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(path), max_seq_length=max_length, load_in_4bit=load_in_4bit
    )
    if adapter is not None:
        # By peft: Unsloth, given an adapter, would load the base that the adapter's config names instead of `path`.
        from peft import PeftModel

        model = FastLanguageModel.for_inference(PeftModel.from_pretrained(model, str(adapter)))
    if lora is not None:
        model = FastLanguageModel.get_peft_model(
            model, r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets),
            use_gradient_checkpointing="unsloth", random_state=seed,
        )  # fmt: skip
    return model, _checked(tokenizer, path)


def _load_on_cpu(
    path: str | Path, lora: LoraSettings | None, adapter: str | Path | None, seed: int
) -> tuple:
    load_unsloth()
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    elif lora is not None:
        torch.manual_seed(seed)
        model = get_peft_model(
            model,
            LoraConfig(
                r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets),
                task_type="CAUSAL_LM",
            ),
        )  # fmt: skip
    return prepare_for_cpu(model), tokenizer


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
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    folder.parent.mkdir(parents=True, exist_ok=True)
    bytes_per_weight = 2 if has_gpu() or dtype in ("bfloat16", "float16") else 4
    needed, free = model.num_parameters() * bytes_per_weight, shutil.disk_usage(folder.parent).free
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
    os.replace(partial, folder)
