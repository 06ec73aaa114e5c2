"""The tiny model that the package carries."""

from pathlib import Path

BASE_MODEL = "arithmetic-base"


def settle_process() -> None:
    """One thread on a CPU, where tensors are too small for two and a second one waits for whatever
    else runs; no bars of libraries for what takes no time here."""
    import datasets
    import torch
    import transformers

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def data_folder() -> Path:
    """The project's data: beside the code in an installed package, beside the package in a
    checkout.
    """
    here = Path(__file__).resolve().parents[1]
    return here / "data" if (here / "data").is_dir() else here.parent / "data"
