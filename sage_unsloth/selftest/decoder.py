"""Qwen2 with an adapter in plain PyTorch, without transformers, peft or custom kernels.

Unsloth replaces transformers' Qwen2 in its process, so an independent forward pass cannot come from
there. In float64 this is the oracle; in another dtype it shows plain PyTorch's rounding.

Shapes: B sequences of T tokens without padding, H hidden size, V vocabulary.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from sage_unsloth.models.quantised import dequantise

_WRAPPERS = re.compile(r"^base_model\.model\.|\.base_layer|\.default(?=\.)")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Values of a Qwen2 config that its weights do not determine."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_epsilon: float


def read_shape(config: Any) -> Shape:
    """The shape in a transformers config of Qwen2.

    Raises:
        ValueError: another family, a scaled RoPE, or a sliding window.
    """
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    if config.model_type != "qwen2" or rope.get("rope_type", "default") != "default":
        raise ValueError(
            "the oracle computes Qwen2 with its plain RoPE only, got "
            f"model_type={config.model_type!r} and {rope}"
        )
    heads = config.num_attention_heads
    return Shape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope_theta=rope["rope_theta"],
        norm_epsilon=config.rms_norm_eps,
    )


class Decoder:
    """The model; its trained weights are the adapter's A and B, leaves of autograd.

    Args:
        adapter: A and B by the names of their linear layer.
        scale: alpha / r of the adapter.
        dtype: of every product. Norms, RoPE's angles and the softmax are float32 at least, as in
            transformers.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Mapping[str, Tensor],
        adapter: Mapping[str, Tensor],
        scale: float,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.scale, self.dtype = shape, scale, dtype
        # Sums that even a format of 16 bits forms in 32.
        self.wide = torch.promote_types(dtype, torch.float32)
        self.weights = {k: w.detach().to(device, dtype) for k, w in weights.items()}
        self.adapter = {
            name: w.detach().to(device, self.wide).clone().requires_grad_(True)
            for name, w in adapter.items()
        }

    def logits(self, ids: Tensor, *, adapted: bool = True) -> Tensor:
        """(T, V) logits of one text, (T,) token ids; `adapted=False` is the base model."""
        x = self.weights["model.embed_tokens.weight"][ids]
        cos, sin = self._angles(len(ids), x.device)
        for layer in range(self.shape.num_layers):
            name = f"model.layers.{layer}."
            h = self._norm(x, name + "input_layernorm")
            x = x + self._attention(h, name + "self_attn.", cos, sin, adapted)
            h = self._norm(x, name + "post_attention_layernorm")
            gate = silu(self._linear(h, name + "mlp.gate_proj", adapted))
            up = self._linear(h, name + "mlp.up_proj", adapted)
            x = x + self._linear(gate * up, name + "mlp.down_proj", adapted)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self._norm(x, "model.norm") @ head.T

    def _linear(self, x: Tensor, name: str, adapted: bool) -> Tensor:
        result = x @ self.weights[name + ".weight"].T
        if name + ".bias" in self.weights:
            result = result + self.weights[name + ".bias"]
        if adapted and name + ".lora_A" in self.adapter:
            a, b = (self.adapter[f"{name}.lora_{side}"].to(self.dtype) for side in "AB")
            result = result + (x @ a.T) @ b.T * self.scale
        return result

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.to(self.wide)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.norm_epsilon)
        return self.weights[name + ".weight"] * wide.to(self.dtype)

    def _angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of RoPE, (T, head size): angle = position · θ^(−2i / head size)."""
        size = self.shape.head_dim
        even = torch.arange(0, size, 2, dtype=self.wide, device=device)
        rates = self.shape.rope_theta ** -(even / size)
        angles = torch.arange(length, dtype=self.wide, device=device)[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _attention(self, x: Tensor, name: str, cos: Tensor, sin: Tensor, adapted: bool) -> Tensor:
        s, length = self.shape, len(x)

        def heads(which: str, number: int) -> Tensor:  # (heads, T, head size)
            return self._linear(x, name + which, adapted).view(length, number, -1).transpose(0, 1)

        def turned(h: Tensor) -> Tensor:
            left, right = h.chunk(2, -1)
            return h * cos + torch.cat([-right, left], -1) * sin

        q, k = turned(heads("q_proj", s.num_heads)), turned(heads("k_proj", s.num_kv_heads))
        v = heads("v_proj", s.num_kv_heads)
        k, v = (h.repeat_interleave(s.num_heads // s.num_kv_heads, 0) for h in (k, v))
        scores = (q @ k.transpose(1, 2) * s.head_dim**-0.5).to(self.wide)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1).to(self.dtype)
        mixed = (weights @ v).transpose(0, 1).reshape(length, -1)
        return self._linear(mixed, name + "o_proj", adapted)


def plain_name(name: str) -> str:
    """A parameter's name in transformers and `Decoder`, without peft's wrappers."""
    name = _WRAPPERS.sub("", name)
    return name.removesuffix(".weight") if ".lora_" in name else name


def make_decoder(
    policy: Any, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Decoder:
    """The model and adapter of a peft policy; 4-bit weights are dequantised."""
    weights, adapter = {}, {}
    for name, parameter in policy.named_parameters():
        name = plain_name(name)
        if ".lora_" in name:
            adapter[name] = parameter
        else:
            weights[name] = dequantise(parameter)
    lora = policy.peft_config["default"]
    scale = lora.lora_alpha / lora.r
    return Decoder(read_shape(policy.config), weights, adapter, scale, dtype=dtype, device=device)
