"""The tiny model in the package, and its folder."""

from pathlib import Path

from sage_unsloth.models.device import has_gpu

BASE_MODEL = "arithmetic-base"
"""Its folder in `data_folder()`, and the name of its preset."""
SMALL = 32 << 20  # bytes of weights


def data_folder() -> Path:
    """The project's data: next to the code if installed, next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "data" if (package / "data").is_dir() else package.parent / "data"


def locate_model(hub_id: str) -> str:
    """A preset's hub id, or the folder of the embedded model."""
    return str(data_folder() / BASE_MODEL) if hub_id == BASE_MODEL else hub_id


def is_small(path: str | Path) -> bool:
    """Whether a model folder's weights are so small that a second thread would only wait."""
    files = list(Path(path).glob("*.safetensors"))
    return bool(files) and sum(file.stat().st_size for file in files) <= SMALL


def settle_process() -> None:
    """Sets this process up for the tiny model: one thread on a CPU, no libraries' progress bars.

    Its tensors are too small for two threads.
    """
    import datasets
    import torch
    import transformers

    if not has_gpu():
        torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
