"""A model's dtype, before the model is loaded."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import BFLOAT16_CAPABILITY, has_gpu
from sage_unsloth.runs.files import read_json

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Possible requests; "auto" is the model's own."""
_IN_FILES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def chosen_dtype(expected: str, path: str | Path) -> str:
    """The dtype to load a model in: the requested one, or its own.

    Args:
        expected: one of `DTYPES`.

    Raises:
        ValueError: an unknown dtype.
    """
    if expected not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {expected!r}")
    return own_dtype(path) if expected == "auto" else expected


def own_dtype(path: str | Path) -> str:
    """The dtype that a model was saved in, by its `config.json` or its first weight file.

    bfloat16 becomes float16 on a GPU without it, and any other dtype float32.
    """
    dtype = _named(_config(path)) or _of_weights(Path(path)) or "float32"
    if dtype == "bfloat16" and has_gpu():
        import torch

        if torch.cuda.get_device_capability() < BFLOAT16_CAPABILITY:
            return "float16"
    return dtype if dtype in DTYPES else "float32"


def _config(path: str | Path) -> Mapping[str, Any]:
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            file = Path(hf_hub_download(str(path), "config.json"))
        except (OSError, HfHubHTTPError, HFValidationError):
            return {}  # its loader says what is wrong with it
    return read_json(file) if file.is_file() else {}


def _named(config: Mapping[str, Any]) -> str | None:
    """A config's own entry, or that of the text model within it."""
    text = config.get("text_config") or {}
    result = (c.get(key) for c in (config, text) for key in ("dtype", "torch_dtype"))
    name = next((value for value in result if value), None)
    return None if name is None else str(name).removeprefix("torch.")


def _of_weights(folder: Path) -> str | None:
    """The dtype of the first floating-point tensor; safetensors begin with a JSON header."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        for name, tensor in header.items():
            if name != "__metadata__" and tensor["dtype"] in _IN_FILES:
                return _IN_FILES[tensor["dtype"]]
    return None
