"""Checks around the loss: the contract, a resumed run, an export."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.export.exporter import export
from sage_unsloth.models.device import has_gpu, release_memory
from sage_unsloth.models.trained import read_run
from sage_unsloth.objective.guides import TokenGuide
from sage_unsloth.patch.contract import check_unsloth
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.runs.record import open_run
from sage_unsloth.selftest import policy
from sage_unsloth.selftest.decoder import decoder_of, plain_name
from sage_unsloth.selftest.findings import PASSED, Finding
from sage_unsloth.trainers.loading import load_unsloth

RESUMED_ALLOWED = 1e-2
"""Relative to the change of the weights, on a GPU, where the order of sums varies. On a CPU the two
runs are equal up to float32's last bits."""


def contract(folder: Path) -> Iterator[Finding]:
    """Unsloth generates its trainer, with everything that the patch relies on."""
    check_unsloth(load_unsloth())
    yield Finding(
        name="patch contract",
        status=PASSED,
        found="every name, parameter and number that the patch relies on is there",
    )


def check_resume(folder: Path) -> Iterator[Finding]:
    """Compares the adapter after three steps with that of two steps and a resumed third.

    The guide has noise and a schedule, so it must restore its step and its generator.
    """
    number_format = policy.half_precision()
    model = policy.small_model(folder / "model")
    straight, start = _train(model, folder / "straight", number_format)
    _train(model, folder / "resumed", number_format, stop_after=2)
    checkpoint = folder / "resumed" / "checkpoint-2"
    ended, _ = _train(model, folder / "resumed", number_format, resume=checkpoint)
    way = (straight - start).norm().item()
    off = (ended - straight).norm().item() / way if way else float("nan")
    allowed = RESUMED_ALLOWED if has_gpu() else 1e-5
    good = off <= allowed
    yield Finding.of(
        good,
        name="three steps, resumed",
        found=f"off by {off:.1e} of the way that the weights went (allowed {allowed:.0e})",
        remedy="a resumed run differs here. Send selftest.json",
        figures={"way": way, "off": off, "allowed": allowed},
    )


def _train(
    model_folder: Path,
    folder: Path,
    number_format: str,
    *,
    stop_after: int | None = None,
    resume: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """The adapter after and before at most three steps, each as one vector."""
    from transformers import TrainerCallback

    class StopAfter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == stop_after

    model, tokenizer = policy.load(model_folder, number_format)
    start = _adapter(model)
    trainer = policy.make_test_trainer(
        model,
        tokenizer,
        folder,
        number_format,
        max_steps=3,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.add_callback(StopAfter())
    with guided_kl(trainer, TokenGuide()):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    end = _adapter(trainer.model)
    del model, trainer
    release_memory()
    return end, start


def _adapter(model: Any) -> Tensor:
    lora = (
        p.detach().double().cpu().flatten() for n, p in model.named_parameters() if "lora_" in n
    )
    return torch.cat(list(lora))


def check_export(folder: Path) -> Iterator[Finding]:
    """Runs the exporter's checks, and compares each merged weight with W + B A · alpha / r in
    float64.
    """
    number_format = policy.half_precision()
    path = policy.small_model(folder / "model")
    model, tokenizer = policy.load(path, number_format)
    run = open_run(folder / "run", {"stage": "rlvr"}, model_path=str(path))
    model.save_pretrained(run / "adapter")
    tokenizer.save_pretrained(run / "adapter")
    decoder = decoder_of(model)
    names = {plain_name(name): p for name, p in model.named_parameters() if ".lora_A" in name}
    del model
    release_memory()
    for kind in ("adapter", "merged"):
        out = export(read_run(run), kind, folder / kind)
        yield Finding(
            name=f"export, {kind}",
            status=PASSED,
            found="written, and its own checks passed",
        )
    off = _merge_error(decoder, [name.removesuffix(".lora_A") for name in names], out)
    allowed = 2 * 2.0**-8  # one rounding to bfloat16, and one of what was loaded
    good = off <= allowed
    yield Finding.of(
        good,
        name="export, merged weights",
        found=f"off by {off:.1e} of the largest weight (allowed {allowed:.1e})",
        remedy="share the adapter, not the merged model. Send selftest.json",
        figures={"error": off, "allowed": allowed},
    )


def _merge_error(decoder: Any, layers: list[str], folder: Path) -> float:
    """The largest error of a weight, relative to the largest weight of its matrix."""
    from safetensors.torch import load_file

    result: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        result |= load_file(file)
    worst = 0.0
    for name in layers:
        a, b = (decoder.adapter[f"{name}.lora_{side}"].detach() for side in "AB")
        expected = decoder.weights[f"{name}.weight"] + b @ a * decoder.scale
        error = (result[f"{name}.weight"].double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, error.item())
    return worst
