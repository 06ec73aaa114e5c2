"""Checks the requests to a separate vLLM server (`trl vllm-serve`) against the configuration.

`engine_choice.check_calls` does the same for an engine in the process. Not run here: the weights go
to the server over NCCL, which needs GPUs on both sides.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from sage_unsloth.sampling.engine_choice import RolloutError


def check_client() -> None:
    """Raises ValueError without a GPU or vLLM, which the client needs to send the weights."""
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
    """Compares every request to a server with the configuration.

    Args:
        client: TRL's `VLLMClient`, whose `generate` is wrapped.
        expected: names of vLLM's `SamplingParams` -> values.

    Raises:
        RolloutError: in a request, if a setting differs or is missing.
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
