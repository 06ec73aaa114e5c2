"""Checks a guided optimizer step against a plain one, and planned against measured memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sage_unsloth.models.device import has_gpu, release_memory
from sage_unsloth.models.meter import measure, memory_source, synchronize
from sage_unsloth.models.random_weights import save_random_model
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.planning.architecture import architecture_of
from sage_unsloth.planning.memory import memory_plan
from sage_unsloth.planning.setup import Setup
from sage_unsloth.selftest import policy
from sage_unsloth.selftest.findings import NOT_HERE, Finding

MIB = 2**20
TIME_ALLOWED, MEMORY_ALLOWED = 1.5, 1.25
"""Ratios far above the measured ones: they detect defects, not costs."""
MEMORY_TOLERANCE = 0.05  # relative, of items that the plan does not call estimates
NUM_STEPS = 4  # of each trainer; the first compiles, and is not counted


@dataclass
class Costs:
    """Costs of one training run; bytes are of the permanent state, by item."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak: float | None = None
    held: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    lengths: tuple[int, int] = (0, 0)


def step_costs(folder: Path) -> Iterator[Finding]:
    """Ratios of time and memory, then the items of the plan."""
    gpu = has_gpu()
    length = 256 if gpu else 16
    path = save_random_model(
        folder / "model",
        *((896, 151_936) if gpu else (256, 8_192)),
        num_layers=8 if gpu else 2,
        intermediate_size=4864 if gpu else 512,
        dtype=policy.half_precision(),
    )
    number_format = policy.half_precision()
    model, tokenizer = policy.load(path, number_format, max_length=4 * length + 256)

    def costs(guide: Any, steps: int = NUM_STEPS) -> Costs:
        trainer = policy.make_test_trainer(
            model,
            tokenizer,
            folder / "out",
            number_format,
            max_steps=steps,
            max_completion_length=length,
            optim="adamw_8bit" if gpu else "adamw_torch",
        )
        result = _measure(trainer, guide)
        del trainer
        release_memory()
        return result

    costs(None, steps=1)  # the first use of anything allocates what stays
    plain, guided = costs(None), costs(BranchGuide(**policy.GUIDE))
    yield from _ratios(plain, guided)
    yield from _plan(model, plain, length)


def _ratios(plain: Costs, guided: Costs) -> Iterator[Finding]:
    # Of the fastest step each: what else the machine does only ever adds time. Where there is no
    # GPU, time of the process on its CPU.
    kind = "seconds" if has_gpu() else "cpu_seconds"
    times = [min(getattr(costs, kind)[1:]) for costs in (plain, guided)]
    yield _ratio("guided step, time", times, TIME_ALLOWED, "s", 1.0)
    if plain.peak is None or guided.peak is None:
        yield Finding(
            name="guided step, memory",
            status=NOT_HERE,
            found="peak memory is measured on a GPU or on Linux",
        )
        return
    peaks = [plain.peak, guided.peak]
    yield _ratio("guided step, memory", peaks, MEMORY_ALLOWED, "MiB", MIB)


def _ratio(name: str, pair: list[float], allowed: float, unit: str, item: float) -> Finding:
    ratio = pair[1] / pair[0]
    good = ratio <= allowed
    return Finding.of(
        good,
        name=name,
        found=f"{ratio:.2f} times the plain one's {pair[0] / item:.3g} {unit}"
        + ("" if good else f" (allowed {allowed:g})"),
        remedy="close other programs and repeat. Send selftest.json",
        figures={"plain": pair[0] / item, "guided": pair[1] / item, "unit": unit, "ratio": ratio},
    )


def _measure(trainer: Any, guide: Any) -> Costs:
    """`trainer.train()` under the guide, step by step and phase by phase."""
    from transformers import TrainerCallback

    costs = Costs()

    class Meter(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.began = time.perf_counter(), time.process_time()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            trained = [p for p in trainer.model.parameters() if p.grad is not None]
            costs.held["gradients"] = sum(p.grad.nbytes for p in trained)
            if has_gpu():
                peak = torch.cuda.max_memory_allocated() - self.before
                costs.phases["update"] = max(peak, costs.phases.get("update", 0))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            costs.seconds.append(time.perf_counter() - self.began[0])
            costs.cpu_seconds.append(time.process_time() - self.began[1])
            costs.held["optimizer"] = _state_bytes(trainer.optimizer)

    meter = Meter()
    trainer.add_callback(meter)
    compute_loss, generate = trainer.compute_loss, trainer._generate

    def loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        costs.lengths = inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1]
        meter.before = _start_phase()
        return compute_loss(model, inputs, *args, **kwargs)

    def rollouts(*args: Any, **kwargs: Any) -> Any:
        before = _start_phase()
        result = generate(*args, **kwargs)
        if has_gpu():
            costs.phases["rollouts"] = torch.cuda.max_memory_allocated() - before
        return result

    trainer.compute_loss, trainer._generate = loss, rollouts
    with _peak(costs), guided_kl(trainer, guide):
        trainer.train()
    for name, of_adapter in (("weights", False), ("adapter", True)):
        costs.held[name] = sum(
            _bytes(p) for n, p in trainer.model.named_parameters() if ("lora_" in n) == of_adapter
        )
    return costs


@contextmanager
def _peak(costs: Costs) -> Iterator[None]:
    """The largest of all phases; the peak is reset at the start of each."""
    if memory_source() is None:
        yield
        return
    with measure() as result:
        yield
    phases = costs.phases.values()
    costs.peak = max(result["peak_bytes"] or 0, *phases) if phases else result["peak_bytes"]


def _start_phase() -> int:
    if not has_gpu():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _bytes(parameter: Any) -> int:
    """Bytes of a weight, of a 4-bit one with its scales."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.nbytes
    scales = state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    return parameter.data.nbytes + scales


def _state_bytes(optimizer: Any) -> int:
    """Of the optimizer's tensors, each counted once."""
    tensors = {
        value.data_ptr(): value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    }
    return sum(tensors.values())


def _plan(model: Any, costs: Costs, length: int) -> Iterator[Finding]:
    """Planned and measured bytes of each measured item of the plan."""
    gpu = has_gpu()
    setup = Setup(
        architecture=architecture_of(model.config),
        lora_rank=policy.RANK,
        weight_bits=32 if policy.half_precision() == "float32" else 16,
        optimizer_8bit=gpu,
        beta=0.5,
        max_prompt_length=costs.lengths[0],
        max_completion_length=max(costs.lengths[1], 1),
        gradient_checkpointing="unsloth" if gpu else "none",
    )
    planned = {item.name: item.bytes for item in memory_plan(setup).items}
    for name in ("weights", "adapter", "gradients", "optimizer"):
        good = abs(costs.held[name] - planned[name]) <= MEMORY_TOLERANCE * planned[name]
        yield _item(name, planned[name], costs.held[name], good)
    if not gpu:
        for name in ("activations and logits", "KV cache"):
            yield Finding(name=f"plan, {name}", status=NOT_HERE, found="needs a GPU to be measured")
        return
    estimates: dict[str, tuple[float, Callable[[], int]]] = {
        # A phase that took more than planned is what a run dies of; less is only waste.
        "activations and logits": (
            planned["activations"] + planned["logits"] + planned["gradients"],
            lambda: costs.phases["update"],
        ),
        "KV cache": (planned["KV cache"] + planned["logits"], lambda: costs.phases["rollouts"]),
    }
    for name, (plan, result) in estimates.items():
        yield _item(name, plan, result(), result() <= plan + planned["reserve"])


def _item(name: str, planned: float, result: float, good: bool) -> Finding:
    return Finding.of(
        good,
        name=f"plan, {name}",
        found=f"{planned / MIB:.3g} MiB planned, {result / MIB:.3g} measured",
        remedy="leave that much more GPU memory free. Send selftest.json",
        figures={"planned_bytes": planned, "measured_bytes": result},
    )
