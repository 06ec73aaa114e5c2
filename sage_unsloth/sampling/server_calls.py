"""Rollouts by a vLLM server of its own (`trl vllm-serve`): every request is compared with what was
configured, as the calls of an engine in the process are (`engine_choice.check_calls`).

Not run here: the weights go to the server over NCCL, which needs GPUs on both sides.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from sage_unsloth.sampling.engine_choice import RolloutError


def check_client() -> None:
    """Raises ValueError without a GPU or vLLM, by whose means the client sends the weights."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "rollouts='server' needs a CUDA device for NCCL, and this machine has none. Set "
            "rollouts=transformers"
        )
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "rollouts='server' needs vllm here too, which is not installed (pip install vllm). "
            "Set rollouts=transformers to go without it"
        )


def check_requests(client: Any, expected: Mapping[str, Any]) -> None:
    """Compare what every request asks a server for with what was configured.

    Args:
        client: TRL's `VLLMClient`, whose `generate` is wrapped.
        expected: names of vLLM's `SamplingParams` -> values.

    Raises:
        RolloutError: in a request, a setting is another one, or is missing.
    """
    generate = client.generate

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = kwargs | (kwargs.get("generation_kwargs") or {})
        result = {name: given.get(name, "absent") for name in expected}
        if result != dict(expected):
            raise RolloutError(
                f"the server must sample as configured, got {result}, expected {dict(expected)}. "
                "Use the tested versions (python -m sage_unsloth doctor), or "
                "rollouts='transformers'"
            )
        return generate(*args, **kwargs)

    client.generate = checked
