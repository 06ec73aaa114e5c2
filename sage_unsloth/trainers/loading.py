"""Imports Unsloth, finds its generated trainer, and prepares CPU models for it."""

import functools
import importlib
import importlib.util
import sys
import types
from typing import Any

import torch

from sage_unsloth.trainers import cpu_vllm, switches
from sage_unsloth.trainers.trainer_names import COMPUTE_LOSS, LOSS, UNSLOTH_MISSING, ContractError


def load_unsloth(*, standby: bool = False) -> types.ModuleType:
    """Imports Unsloth, generates its GRPO trainer, and returns that trainer's module.

    Without a GPU this first applies `switches.run_without_gpu`. Afterwards `trl.GRPOTrainer` is the
    generated class.

    Args:
        standby: vLLM's cache is freed for training and restored for rollouts. Unsloth reads it on
            import, and it costs memory otherwise, so it is only for runs with vLLM.

    Raises:
        ValueError: Unsloth is not installed.
        ContractError: Unsloth did not generate a trainer and TRL's own is in its place.
    """
    if "unsloth" not in sys.modules and importlib.util.find_spec("unsloth") is None:
        raise ValueError(UNSLOTH_MISSING)
    if standby:
        switches.use_standby()
    if not torch.cuda.is_available():
        switches.run_without_gpu()
        cpu_vllm.keep_one_library()
    importlib.import_module("unsloth")
    import trl

    generated = hasattr(sys.modules[trl.GRPOTrainer.__module__], LOSS)
    if not torch.cuda.is_available() and not generated:
        rl = importlib.import_module("unsloth.models.rl")
        rl._patch_trl_rl_trainers("grpo_trainer")
    return trainer_module(trl.GRPOTrainer)


def trainer_module(trainer_class: type) -> types.ModuleType:
    """The module of the Unsloth trainer that `trainer_class` is, or derives from.

    Raises:
        ContractError: it is TRL's own trainer, Unsloth's fallback (with one warning) if generation
            fails.
    """
    for base in trainer_class.__mro__:
        module = sys.modules.get(base.__module__)
        if module is not None and COMPUTE_LOSS in vars(base) and hasattr(module, LOSS):
            return module
    raise ContractError(
        "where Unsloth is imported the trainer must be Unsloth's generated GRPOTrainer (import "
        "unsloth, or call sage_unsloth.load_unsloth(), before trl, or import neither to use TRL's "
        "own)",
        actual=f"{trainer_class.__module__}.{trainer_class.__qualname__}",
        expected=f"a class whose module defines {LOSS}",
    )


def prepare_for_cpu(model: Any) -> Any:
    """Gives a transformers or peft model what Unsloth's trainer expects, without
    `FastLanguageModel`.

    Also marks the model as loaded in float32 on purpose. Without that mark Unsloth trains a float32
    model under float16 autocast, on a CPU too, but scores the reference without it: policy and
    reference then differ by 1e-2 nats before the first step.
    """
    llama = importlib.import_module("unsloth.models.llama").FastLlamaModel
    model._unsloth_user_float32 = True
    model.for_training = functools.partial(llama.for_training, model)
    model.for_inference = functools.partial(llama.for_inference, model)
    return model
