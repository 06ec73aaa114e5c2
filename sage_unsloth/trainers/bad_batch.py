"""The batch with a number that was not finite: saved, and repeated from disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.runs.files import read_json, whole_folder, write_json
from sage_unsloth.trainers.replaced import replace_attributes


def save_bad_batch(
    folder: Path,
    record: dict,
    *,
    inputs: Mapping[str, Any],
    signals: Mapping[str, Tensor],
    texts: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> None:
    """Writes `batch.json`, `batch.safetensors` and `weights.safetensors`, complete or not at all.

    Args:
        folder: replaced if it exists.
        record: the fault and its place.
        inputs: of `compute_loss`; its tensors and numbers are saved.
        signals: further tensors of the loss.
        texts: prompts, completions and rewards, for a bad reward.
    """
    from safetensors.torch import save_file

    tensors = {f"inputs.{k}": v for k, v in inputs.items() if torch.is_tensor(v)}
    tensors |= {f"signals.{name}": values for name, values in signals.items()}
    numbers = {k: v for k, v in inputs.items() if isinstance(v, int | float)}
    plain_texts = json.loads(json.dumps(texts, default=repr))
    with whole_folder(folder, replace=True) as partial:
        partial.mkdir()
        write_json(partial / "batch.json", record | {"inputs": numbers} | plain_texts)
        for name, content in {"batch": tensors, "weights": weights}.items():
            own = {k: v.detach().cpu().contiguous().clone() for k, v in content.items()}
            save_file(own, partial / f"{name}.safetensors")


def reproduce(trainer: Any, folder: str | Path) -> None:
    """Repeats the micro-batch of a bad batch, forward and backward, on the weights of that step.

        with guided_kl(trainer, guide, log_entropy=True):  # as in the run
            reproduce(trainer, "out/bad_batch")

    Args:
        trainer: with the run's settings and model; its trained weights are overwritten.
        folder: written by `finite_only`.

    Raises:
        NotFiniteError: as in the run; nothing is raised if every number is finite this time.
        ValueError: the folder holds a bad reward, whose function must be called on its
            `batch.json`; or it belongs to another model.
    """
    from safetensors.torch import load_file

    record = read_json(Path(folder) / "batch.json")
    if record["kind"] == "reward":
        raise ValueError(
            f"a bad batch must hold tensors to reproduce, but {folder} keeps {record['what']}. "
            "Call that function on the prompts and completions in its batch.json"
        )
    weights = load_file(Path(folder) / "weights.safetensors")
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    if {n: p.shape for n, p in trained.items()} != {n: w.shape for n, w in weights.items()}:
        raise ValueError(
            f"the trainer must train the {len(weights)} weights that {folder} keeps, names and "
            f"shapes, but it trains {len(trained)} others. Build it with the model and the adapter "
            "settings of the run"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            trained[name].copy_(weight)
    tensors = load_file(Path(folder) / "batch.safetensors", device=str(trainer.accelerator.device))
    inputs = {n.removeprefix("inputs."): t for n, t in tensors.items() if n.startswith("inputs.")}
    trainer.state.global_step, trainer.state.max_steps = record["step"] - 1, record["max_steps"]
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.zero_grad()
    # The trainer's own would draw another batch.
    with replace_attributes(trainer, _prepare_inputs=lambda _: inputs | record["inputs"]):
        trainer.training_step(trainer.model, {}, None)
