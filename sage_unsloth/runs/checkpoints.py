"""Checkpoints of both training stages: finds the newest complete one, and deletes old ones.

transformers writes a checkpoint file by file under its final name, does not sync it, and deletes
old ones by modification time, which is wrong after a clock was set back. So it deletes none, and
`keep_newest` does:

    saved → every file on the disk → sizes.json → all but the two newest complete ones deleted
"""

import itertools
import json
import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import set_modes, sync, write_json
from sage_unsloth.runs.processes import rank, wait_for_all, world_size

SIZES = "sizes.json"
"""In a synced checkpoint: the sizes of its files in bytes, by name."""
FSDP_MODEL = "pytorch_model_fsdp.bin"
"""The whole model in a checkpoint of FSDP (`fsdp_state_dict_type: FULL_STATE_DICT`)."""
DEEPSPEED_LATEST = "latest"
"""In a checkpoint of DeepSpeed: names the folder with the parts of all processes."""
NUM_CHECKPOINTS = 2
"""Number of complete checkpoints that stay."""
MISSING_FILE_ERRORS = (FileNotFoundError, NotADirectoryError)
# What readers raise over a file that is damaged. Any other OSError, of a disk that is away for a
# moment, says nothing about the file.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)

logger = logging.getLogger(__name__)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    for path in _newest_first(folder):
        fault = _fault(path)
        if fault is None:
            return path
        logger.warning("checkpoint %s is incomplete and is passed over: %s", path, fault)
    return None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def is_last(checkpoint: Path | None) -> bool:
    """Whether nothing is left to train; if resumed, the trainer would train a step too many."""
    if checkpoint is None:
        return False
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return state["global_step"] >= state["max_steps"]


def trained_adapter(folder: Path, newest: Path | None) -> Path | None:
    """The result of a finished training, or None: `adapter/`, or else the last checkpoint.

    The second is used if the run was killed before it wrote `adapter/`.

    Args:
        newest: its `last_checkpoint`.
    """
    adapter = folder / "adapter"
    return adapter if adapter.exists() else newest if is_last(newest) else None


def copy_result(checkpoint: Path, folder: Path) -> None:
    """Copies what the model saved of itself to `folder`, without its tokenizer."""
    folder.mkdir()
    others = ("trainer_state.json", SIZES, "tokenizer.json", "tokenizer_config.json")
    for file in checkpoint.iterdir():
        if file.suffix in (".safetensors", ".json", ".md") and file.name not in others:
            shutil.copy(file, folder / file.name)


def keep_newest(folder: Path, step: int) -> None:
    """Waits until `step`'s checkpoint is on disk, then keeps the `NUM_CHECKPOINTS` newest."""
    newest = folder / f"checkpoint-{step}"
    set_modes(newest)
    files = [file for file in newest.iterdir() if file.is_file() and file.name != SIZES]
    for path in (*files, newest, folder):
        sync(path)
    write_json(newest / SIZES, {file.name: file.stat().st_size for file in sorted(files)})
    fault = _fault(newest)
    if fault is not None:
        logger.warning("checkpoint %s is incomplete, so none is deleted: %s", newest, fault)
        return
    # Looking for a fault reads every byte of the optimizer's state: at no more of them than are
    # kept.
    others = [path for path in _newest_first(folder) if path != newest]
    selected = list(
        itertools.islice((path for path in others if _fault(path) is None), NUM_CHECKPOINTS - 1)
    )
    for path in others:
        if path not in selected:
            shutil.rmtree(path)


def keeper() -> Any:
    """A callback: `keep_newest` after each save; deletes incomplete checkpoints before a resume."""
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Files of the old one among those of a new one of the same step would be no checkpoint.
            if rank() == 0:
                for path in _newest_first(Path(args.output_dir)):
                    if step_of(path) > state.global_step and _fault(path) is not None:
                        shutil.rmtree(path)
            wait_for_all()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wait_for_all()  # each process writes its random state
            if rank() == 0:
                keep_newest(Path(args.output_dir), state.global_step)

    return Keeper()


def _newest_first(folder: Path) -> list[Path]:
    results = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    return sorted(results, key=step_of, reverse=True)


def _optimizer(checkpoint: Path) -> tuple[str, ...]:
    """The optimizer's state; for a split model also its weights."""
    if (checkpoint / FSDP_MODEL).exists():
        return (FSDP_MODEL, "optimizer.bin")
    if (latest := checkpoint / DEEPSPEED_LATEST).exists():
        folder = latest.read_text(encoding="utf-8").strip()
        parts = [f"{folder}/{file.name}" for file in sorted((checkpoint / folder).glob("*.pt"))]
        if sum(part.endswith("optim_states.pt") for part in parts) < world_size():
            raise FileNotFoundError(f"{folder} lacks a process's optim_states.pt")
        return tuple(parts)
    return ("optimizer.pt",)


def _fault(checkpoint: Path) -> str | None:
    """What is missing or damaged of the files for resuming, or None.

    Without `SIZES`, after a kill during saving, the files are checked by their own formats.
    """
    from safetensors import SafetensorError, safe_open

    name = SIZES
    # Each process keeps its own random state.
    random_states = ["rng_state.pth"]
    if world_size() > 1:
        random_states = [f"rng_state_{i}.pth" for i in range(world_size())]
    try:
        if (checkpoint / SIZES).exists():
            for name, size in json.loads((checkpoint / SIZES).read_text()).items():
                result = (checkpoint / name).stat().st_size
                if result != size:
                    return f"{name} has {result} of {size} bytes"
        for name in (*_optimizer(checkpoint), "scheduler.pt", *random_states):
            # PyTorch's files are zip archives: the directory is at the end, with checksums.
            with zipfile.ZipFile(checkpoint / name) as archive:
                if archive.testzip() is not None:
                    return f"{name} is damaged"
        name = "trainer_state.json"
        json.loads((checkpoint / name).read_text())
        name, index = "model.safetensors.index.json", checkpoint / "model.safetensors.index.json"
        shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
        weights = [checkpoint / name for name in shards] or list(checkpoint.glob("*.safetensors"))
        for file in weights:
            name = file.name
            with safe_open(file, "pt"):  # checks the header against the file's length
                pass
    except (*MISSING_FILE_ERRORS, *DAMAGED, SafetensorError, zipfile.BadZipFile) as error:
        return f"{name}: {error}"
    return None if weights else "it has no *.safetensors"
