"""Checks that a rollout does not change the trained weights.

Unsloth gives vLLM the adapter as a request that holds the policy's live tensors (`load_lora(…,
load_tensors=True)`). vLLM takes them by `tensor.to(device, dtype)`, which does not copy if dtype
and device match, and folds the factor alpha / r into `lora_B` in place. So each rollout would
silently multiply the policy's own `lora_B` by alpha / r. While `keep_trained_weights` is open

    requests     carry fresh copies of the tensors
    weights      have the same digest before and after each rollout, whatever the engine

The second also detects requests made in another way, and costs one pass over the trained weights
(docs/trust.md has the time).
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.data_parallel import own_part
from sage_unsloth.trainers.listening import listen
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.trainer_names import ContractError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChangedWeightsError(RuntimeError):
    """A rollout has changed a trained weight."""


def digest(weights: dict[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bits, read as integers, modulo 2⁶⁴.

    Integer sums do not depend on the order, so equal tensors have equal digests on any device. A
    factor above 1 makes the bits of every nonzero number a larger integer, of either sign, and one
    below 1 a smaller, so any factor is detected. One transfer from the device in all.
    """
    if not weights:
        return {}
    own = [own_part(w.detach()) for w in weights.values()]
    sums = [w.view(INTEGERS[w.element_size()]).sum() for w in own]
    device = sums[0].device
    return dict(zip(weights, torch.stack([s.to(device) for s in sums]).tolist(), strict=True))


@contextmanager
def keep_trained_weights(trainer: Any) -> Iterator[None]:
    """Within this context, a rollout that changes a trained weight stops training.

    `guided_kl` opens it by itself.

    Raises:
        ChangedWeightsError: after such a rollout, before anything is trained on it.
        ContractError: Unsloth makes its requests in another way than was tested.
    """

    def check(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        before = digest(trained)
        batch = proceed(*args, **kwargs)
        now = dict(trainer.model.named_parameters())
        after = digest({name: now[name] for name in trained})
        changed = [name for name in trained if after[name] != before[name]]
        if changed:
            raise ChangedWeightsError(
                "a rollout must not change the trained weights, but the one of step "
                f"{trainer.state.global_step + 1} changed {len(changed)} of {len(trained)}, the "
                f"first is {changed[0]} (vLLM multiplies lora_B by alpha / r in place where it is "
                "given the policy's own tensors). Nothing was trained on it, and no checkpoint has "
                "these weights. Resume from the last one with rollouts by transformers "
                "(use_vllm=False), or with lora_alpha = r, which makes that factor 1"
            )
        return batch

    with ExitStack() as stack:
        if hasattr(getattr(trainer, "vllm_generation", None), names.ENGINE_LORA):
            stack.enter_context(_copies_for_the_engine())
        stack.enter_context(listen(trainer, "weights", **{names.ROLLOUT: check}))
        yield


@contextmanager
def _copies_for_the_engine() -> Iterator[None]:
    """Within this context, Unsloth's requests for vLLM hold copies of the tensors."""
    module = importlib.import_module("unsloth_zoo.vllm_utils")
    build = getattr(module, names.LORA_REQUEST, None)
    result = () if build is None else tuple(inspect.signature(build).parameters)
    expected = names.LORA_REQUEST_PARAMETERS
    if build is None or result[: len(expected)] != expected:
        raise ContractError(
            f"{module.__name__} must make the engine's adapter requests by {names.LORA_REQUEST}",
            actual=result or "nothing",
            expected=expected,
        )

    def with_copies(*args: Any, **kwargs: Any) -> Any:
        request = build(*args, **kwargs)
        live = getattr(request, "lora_tensors", None)  # a request of a folder has none
        if live:
            with torch.inference_mode(False), torch.no_grad():
                request.lora_tensors = {name: tensor.clone() for name, tensor in live.items()}
        return request

    with replace_attributes(module, **{names.LORA_REQUEST: with_copies}):
        yield
