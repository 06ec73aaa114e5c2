"""The weights in a folder, and whether a LoRA adapter fits its base."""

import hashlib
import logging
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_json

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_WHOLE_FILE = 256 << 20  # bytes; larger files are sampled for their digest
SPANS, SPAN = 1024, 64 << 10  # places and bytes of a larger file, evenly over it

logger = logging.getLogger(__name__)


def adapter_config(adapter: str | Path) -> dict[str, Any]:
    """The `adapter_config.json` of a peft folder; ValueError if missing."""
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        raise ValueError(
            f"an adapter must be a folder with adapter_config.json, but {adapter} has none"
        )
    return read_json(path)


def refuse_pickles(folder: str | Path) -> None:
    """Raises ValueError for a folder with only pickled weights, which can contain code."""
    folder = Path(folder)
    pickles = [file.name for pattern in PICKLES for file in sorted(folder.glob(pattern))]
    if pickles and not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"weights must be safetensors, because loading a pickle can run code, but {folder} has "
            f"only {pickles[0]}. If you trust it, load it by transformers or peft, and save it by "
            "save_pretrained"
        )


def check_adapter_fits(base: str | Path, adapter: str | Path) -> None:
    """Raises ValueError for an adapter that was trained on another base.

    Models of one architecture accept each other's adapters without an error, and the result is a
    model that nobody trained. If the adapter's base is on this disk, its weights must equal those
    of `base`; otherwise the shapes must fit. Pickles are refused.
    """
    refuse_pickles(adapter)
    named = adapter_config(adapter).get("base_model_name_or_path")
    if named and Path(named).is_dir() and Path(base).is_dir():
        if model_identity(named) != model_identity(base):
            raise ValueError(
                f"an adapter needs the base that it was trained on, {named} for {adapter}, and "
                f"{base} has other weights. Give {named}+{adapter}"
            )
        return
    if Path(base).is_dir():
        _check_shapes(Path(base), Path(adapter))
    if named != str(base):
        logger.warning(
            "%s names %s as its base, which is not at hand: it is not checked that %s has its "
            "weights",
            adapter,
            named,
            base,
        )


def _check_shapes(base: Path, adapter: Path) -> None:
    """Raises ValueError for a LoRA matrix that its layer in `base` does not take."""
    shapes = _shapes(base)
    for name, shape in _shapes(adapter).items():
        module, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        weight = shapes.get(f"{module}.weight")
        if not side or (weight is not None and len(weight) != 2):
            continue
        # A is (rank, in), B is (out, rank), and the base's weight (out, in).
        axis = 1 if side[0] == "A" else 0
        if weight is None or weight[axis] != shape[axis]:
            result = (
                "no such layer" if weight is None else f"a weight of shape {tuple(weight)} there"
            )
            raise ValueError(
                f"an adapter must fit its base, but {adapter} has {name} of shape {tuple(shape)}, "
                f"and {base} has {result}. Give the base that it was trained on"
            )


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor by name, without loading it."""
    from safetensors import safe_open

    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            # It has keys and is no dict: one cannot iterate over it.
            for name in tensors.keys():  # noqa: SIM118
                shapes[name] = tensors.get_slice(name).get_shape()
    return shapes


def model_identity(path: str | Path, adapter: str | Path | None = None) -> dict[str, Any]:
    """Digests of a model's and an adapter's files, independent of their location; a hub id is its
    name.
    """
    return {
        "weights": _files_digest(Path(path)) if Path(path).is_dir() else str(path),
        "adapter": None if adapter is None else _files_digest(Path(adapter)),
    }


def _files_digest(folder: Path) -> str:
    """Of configuration and weights: names, sizes and bytes, of large files in samples."""
    digest = hashlib.sha256()
    patterns = ("*config.json", "*.safetensors", "*.bin")
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= MAX_WHOLE_FILE:
                digest.update(stream.read())
                continue
            for number in range(SPANS):
                stream.seek(number * (size - SPAN) // (SPANS - 1))
                digest.update(stream.read(SPAN))
    return digest.hexdigest()[:12]
