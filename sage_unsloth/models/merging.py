"""Merges an adapter into its base and saves an ordinary model folder."""

import shutil
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.quantised import is_quantised, merge_dequantised
from sage_unsloth.runs.files import whole_folder
from sage_unsloth.trainers.backends import UNSLOTH, backend


def save_merged(
    model: Any, tokenizer: Any, folder: str | Path, *, dtype: str | None = None
) -> None:
    """Merges the adapter into its base and saves an ordinary model folder, complete or not at all.

    Without a GPU, an adapter on 4-bit weights is merged into their dequantised values: the result
    is the trained policy, and must not be quantised again (`merge_dequantised`). On a GPU Unsloth
    merges it into the original weights, which is another model; an export records the difference.

    Unsloth gets an absolute path: on Kaggle it moves a relative one that does not fit to /tmp, and
    only prints that.

    Args:
        model: with an adapter, or fully trained.
        dtype: of the weights without a GPU ("bfloat16"); None keeps the model's. On a GPU they have
            16 bits.

    Raises:
        OSError: the disk is too small, or the writer left no model in the folder.
    """
    from peft import PeftModel

    folder = Path(folder).absolute()
    with whole_folder(folder) as partial:
        bytes_per_weight = 2 if has_gpu() or dtype in ("bfloat16", "float16") else 4
        needed = model.num_parameters() * bytes_per_weight
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise OSError(
                f"the merged model needs {needed / 2**30:.1f} GiB, but {folder.parent} has "
                f"{free / 2**30:.1f} GiB free. Free some, or choose a folder on another disk"
            )
        if has_gpu() and backend() == UNSLOTH:
            from unsloth.save import patch_saving_functions

            # An adapter that peft loaded has only its base's saving functions, which refuse.
            patch_saving_functions(model)
            # None pins safetensors; True lets Unsloth write a pickle on machines with one or two
            # CPUs.
            model.save_pretrained_merged(
                str(partial), tokenizer, save_method="merged_16bit", safe_serialization=None
            )
        else:
            if is_quantised(model):
                merged = merge_dequantised(model)
            else:
                merged = model.merge_and_unload() if isinstance(model, PeftModel) else model
            if dtype is not None:
                import torch

                merged = merged.to(getattr(torch, dtype))
            merged.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        if not (partial / "config.json").exists() or not list(partial.glob("*.safetensors")):
            raise OSError(
                f"a saved model must have config.json and *.safetensors, but {partial} lacks one "
                "(Unsloth's last lines say where it saved). Set UNSLOTH_KAGGLE_USE_TMP=0, free "
                "disk space, and try again"
            )
