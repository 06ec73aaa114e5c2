"""4-bit weights: bitsandbytes' NF4 with doubly quantised scales, as Unsloth uses them on a GPU.

The linear layers are quantised and frozen; embeddings, norms, the head and the adapter are not.
Every product uses the dequantised values, in the dtype of the activations.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_unsloth.runs.files import read_json

DEQUANTISED_KEY = "values_of_4bit_weights"
"""In the `config.json` of a model that `merge_dequantised` made."""


def four_bit_config(dtype: torch.dtype) -> Any:
    """The quantisation config for transformers; products are computed in `dtype`."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def is_quantised(model: Any) -> bool:
    """Whether a model, or the base of a peft model, has 4-bit weights."""
    return any(_is_4bit(parameter) for parameter in model.parameters())


def keep_exact_products(model: nn.Module) -> None:
    """Prevents bitsandbytes from changing a model's weights on a CPU with AVX512-BF16.

    In the first pass without gradients it would repack them with scales rounded to bfloat16, and
    then compute every product in bfloat16, also in training, where no gradient passes through such
    a product. Sampling would change the policy and cut its gradient off.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def dequantise(parameter: Tensor) -> Tensor:
    """The weight's values; of 4-bit weights those that its products use."""
    if not _is_4bit(parameter):
        return parameter.data
    from bitsandbytes.functional import dequantize_4bit

    state: Any = parameter
    return dequantize_4bit(parameter.data, state.quant_state)


def merge_dequantised(model: Any) -> Any:
    """A peft model on 4-bit weights as an ordinary model: W + (alpha / r) B A for each layer.

    W is the dequantised weight. So it computes the trained policy up to rounding; the original
    weights would give another model. The layers are replaced in `model` itself. It must not be
    quantised again: nearly every value is a level of its block, to which B A, smaller than half the
    distance between two levels, is rounded back.
    """
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for name, module in list(base.named_modules()):
        if isinstance(module, LoraLayer):
            layer: Any = module.get_base_layer()
            if _is_4bit(layer.weight):
                weight = dequantise(layer.weight)
                for adapter in module.active_adapters:
                    delta = module.get_delta_weight(adapter)
                    weight = (weight.to(delta.dtype) + delta).to(weight.dtype)
                layer = _linear(weight, layer.bias)
            else:
                module.merge()
            base.set_submodule(name, layer)
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and _is_4bit(module.weight):
            base.set_submodule(name, _linear(dequantise(module.weight), module.bias))
    base.hf_quantizer.remove_quantization_config(base)
    setattr(base.config, DEQUANTISED_KEY, True)
    return base


def refuse_quantising_again(path: str | Path) -> None:
    """Raises ValueError for a model of `merge_dequantised`; hub ids are not checked."""
    config = Path(path) / "config.json"
    if config.is_file() and read_json(config).get(DEQUANTISED_KEY):
        raise ValueError(
            "a model merged into 4-bit weights must not be quantised again, which rounds off "
            f"nearly all of its training, got {path}. Start from its run, or leave load_in_4bit off"
        )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    return layer


def _is_4bit(parameter: Tensor) -> bool:
    return getattr(parameter, "quant_state", None) is not None
