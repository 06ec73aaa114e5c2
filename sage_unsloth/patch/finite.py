"""Numbers that are not finite stop a run before they reach its weights, and leave the batch that
they came from.

    rewards      what each reward function returns; None, TRL's "no reward", is none of them
    signals      per micro-batch: log-probs of policy, reference and teacher, entropies, log q,
                 advantages
    loss         of each micro-batch
    gradients    after each backward pass, before they are clipped and applied
    weights      the trained ones after each optimizer step, before a checkpoint takes them

TRL and transformers let these pass: a reward that is nan or inf becomes an advantage of 0, a loss
that is nan is logged as the mean of those before it, and AdamW makes a nan gradient a nan weight.
Here a sum or a norm of each tensor is looked at, all of a micro-batch in one transfer, beside ones
that the trainer makes anyway; elements only where that one is not finite. Nothing of it is compiled
code.

Under fp16 the loss is scaled, and a gradient that overflows makes the scaler skip the step and
halve the scale: so a gradient counts once the scale has come down to 1. What vLLM reports of the
sampling is left alone: Unsloth has its own remedy for that.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.patch.data_parallel import check_same_gradients
from sage_unsloth.patch.replaced import replaced, watched
from sage_unsloth.runs.files import read_json, whole_folder, write_json
from sage_unsloth.runs.record import environment

BAD_BATCH = "bad_batch"
"""Folder within the trainer's `output_dir`; of several processes the others than the first add
their number.
"""
GRADE = "_calculate_rewards"
REMEDIES = {
    "reward": "repair that reward function, or let it return None where there is no reward",
    "gradient": "a lower learning rate or max_grad_norm, or bf16 instead of fp16, helps most often",
    "weight": "lower the learning rate",
}


class NotFiniteError(ValueError):
    """A number of a training step is nan or inf."""


class Guard:
    """What is looked at while `finite_only` is open; `guided_kl` hands it what only the loss
    knows.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.inputs: Mapping[str, Any] = {}
        self._trained: list[tuple[str, Tensor]] | None = None

    def check_rewards(
        self, name: str, rewards: Sequence[float | None], prompts: Sequence, completions: Sequence
    ) -> None:
        for row, reward in enumerate(rewards):
            if reward is not None and not math.isfinite(reward):
                texts = {
                    "rewards": [repr(r) for r in rewards],
                    "prompts": prompts,
                    "completions": completions,
                }
                self._stop("reward", f"the reward of {name}", float(reward), (row,), texts=texts)

    def check_signals(self, signals: Mapping[str, Tensor | None], mask: Tensor) -> None:
        """Tensors by name, each (B, T), of which only the mask's tokens count, or (B,)."""
        valid = mask.bool()
        inside = {
            name: torch.where(valid, values.detach(), 0)
            if values.shape == mask.shape
            else values.detach()
            for name, values in signals.items()
            if values is not None
        }
        if _all_finite([values.float().sum() for values in inside.values()]):
            return
        for name, values in inside.items():
            place = _first(values)
            if place is not None:
                kept = {k: v for k, v in signals.items() if v is not None} | {"mask": mask}
                value, (row, *column) = values[place].item(), place
                token = [int(valid[row, : column[0]].sum())] if column else []
                self._stop("signal", name, value, (row, *token), signals=kept)

    def check_backward(self, loss: Tensor) -> None:
        """Of one micro-batch: its loss, and the gradients as far as they are summed up."""
        gradients = [(n, p.grad) for n, p in self._weights() if p.grad is not None]
        norms = torch._foreach_norm([g for _, g in gradients]) if gradients else []
        if _all_finite([loss.detach(), *norms]):
            return
        if not math.isfinite(loss.item()):
            self._stop("loss", "the loss", loss.item(), ())
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        if scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1:
            return
        for name, gradient in gradients:
            place = _first(gradient)
            if place is not None:
                self._stop("gradient", f"the gradient of {name}", gradient[place].item(), place)

    def check_weights(self) -> None:
        trained = self._weights()
        if _all_finite(torch._foreach_norm([p.detach() for _, p in trained])):
            return
        for name, weight in trained:
            place = _first(weight.detach())
            if place is not None:
                self._stop("weight", f"the trained weight {name}", weight[place].item(), place)

    def _weights(self) -> list[tuple[str, Tensor]]:
        if self._trained is None:
            self._trained = [
                (n, p) for n, p in self.trainer.model.named_parameters() if p.requires_grad
            ]
        return self._trained

    def _stop(
        self,
        kind: str,
        what: str,
        value: float,
        place: tuple[int, ...],
        *,
        signals: Mapping[str, Tensor] | None = None,
        texts: Mapping[str, Any] | None = None,
    ) -> None:
        state, args = self.trainer.state, self.trainer.args
        step = state.global_step + (kind != "weight")
        names = ("row", "token") if kind in ("signal", "reward") else ("index",) * len(place)
        where = ", ".join(f"{name} {i}" for name, i in zip(names, place, strict=False))
        process = self.trainer.accelerator.process_index
        folder = Path(args.output_dir) / (f"{BAD_BATCH}_{process}" if process else BAD_BATCH)
        record = {
            "step": step,
            "max_steps": max(state.max_steps, args.max_steps),
            "kind": kind,
            "what": what,
            "value": repr(value),
            "place": list(place),
            "process": process,
            "environment": environment(),
        }
        try:
            self._save(folder, record, signals or {}, texts or {})
            kept = f"its batch is kept in {folder} (sage_unsloth.patch.finite.reproduce)"
        except Exception as error:  # what is to be told is not that
            kept = f"its batch could not be kept: {type(error).__name__}: {error!s:.200}"
        done = (
            "the step has been made, and no checkpoint has it"
            if kind == "weight"
            else "the weights are as before it"
        )
        remedy = REMEDIES.get(
            kind, "see whether a lower learning rate, or bf16 in the place of fp16, keeps it finite"
        )
        raise NotFiniteError(
            f"every number of a training step must be finite; in step {step}, {what} is "
            f"{value}{' at ' if where else ''}{where}; "
            f"{done}; {kept}; {remedy}; a run that is started again goes on from its last "
            f"checkpoint, other settings need a new --out"
        )

    def _save(self, folder: Path, record: dict, signals: Mapping, texts: Mapping) -> None:
        from safetensors.torch import save_file

        inputs = {} if texts else dict(self.inputs)
        tensors = {f"inputs.{k}": v for k, v in inputs.items() if torch.is_tensor(v)}
        tensors |= {f"signals.{name}": values for name, values in signals.items()}
        numbers = {k: v for k, v in inputs.items() if isinstance(v, int | float)}
        with whole_folder(folder, replace=True) as partial:
            partial.mkdir()
            write_json(
                partial / "batch.json",
                record | {"inputs": numbers} | json.loads(json.dumps(texts, default=repr)),
            )
            for name, content in {"batch": tensors, "weights": dict(self._weights())}.items():
                own = {k: v.detach().cpu().contiguous().clone() for k, v in content.items()}
                save_file(own, partial / f"{name}.safetensors")


@contextmanager
def finite_only(trainer: Any) -> Iterator[Guard]:
    """Within this context, training stops at the first number that is not finite; `guided_kl` opens
    it.

    Args:
        trainer: any transformers `Trainer`; of a GRPO trainer the rewards too.

    Raises:
        NotFiniteError: naming the step, the tensor and the place. The batch is in `bad_batch`
            within `trainer.args.output_dir`: `batch.json` (what, where, in which step),
            `batch.safetensors` (what `compute_loss` was given, and the signals) and
            `weights.safetensors` (the trained weights); of a bad reward the prompts, completions
            and rewards. See `reproduce`.
    """
    from transformers import TrainerCallback

    guard = Guard(trainer)

    class Watch(TrainerCallback):
        compared = trainer.accelerator.num_processes == 1

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.compared:
                check_same_gradients(trainer, trainer.model.parameters())
                self.compared = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            guard.check_weights()

    compute_loss, training_step = trainer.compute_loss, trainer.training_step

    def compute(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        guard.inputs = inputs
        return compute_loss(model, inputs, *args, **kwargs)

    def step(*args: Any, **kwargs: Any) -> Tensor:
        loss = training_step(*args, **kwargs)
        guard.check_backward(loss)
        return loss

    functions: dict[str, Callable] = {"compute_loss": compute, "training_step": step}
    if hasattr(trainer, GRADE):
        functions[GRADE] = _checked_rewards(trainer, guard)
    with replaced(trainer, **functions), watched(trainer, Watch()):
        yield guard


def reproduce(trainer: Any, folder: str | Path) -> None:
    """Makes the micro-batch of a bad batch again, forwards and backwards, on the weights that it
    met.

        with guided_kl(trainer, guide, log_entropy=True):  # as in the run
            reproduce(trainer, "out/bad_batch")

    Args:
        trainer: with the run's settings and model; its trained weights are overwritten.
        folder: what `finite_only` left.

    Raises:
        NotFiniteError: as in the run. None is raised if every number is finite this time.
        ValueError: the folder keeps a bad reward, whose function is to be called on its
            `batch.json`; or it is of another model.
    """
    from safetensors.torch import load_file

    record = read_json(Path(folder) / "batch.json")
    if record["kind"] == "reward":
        raise ValueError(
            f"a bad batch must have tensors to go through the loss; {folder} keeps "
            f"{record['what']}; call that function on the "
            "prompts and completions in its batch.json"
        )
    weights = load_file(Path(folder) / "weights.safetensors")
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    if {n: p.shape for n, p in trained.items()} != {n: w.shape for n, w in weights.items()}:
        raise ValueError(
            f"the trainer must train the weights that {folder} keeps, of {len(weights)} names "
            f"and their shapes; it trains "
            f"{len(trained)} others; build it with the model and the adapter's settings of the run"
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
    with replaced(trainer, _prepare_inputs=lambda _: inputs | record["inputs"]):
        trainer.training_step(trainer.model, {}, None)


def _checked_rewards(trainer: Any, guard: Guard) -> Callable[..., Tensor]:
    """`_calculate_rewards` with each function's own values looked at: in its result None and nan
    are the same.
    """
    calculate = getattr(trainer, GRADE)

    def checked(function: Any, name: str) -> Any:
        # Reward models and coroutines are told from functions by what they are.
        if isinstance(function, torch.nn.Module):
            return function
        if any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004

            async def call_later(
                *, prompts: Sequence, completions: Sequence, **kwargs: Any
            ) -> list:
                rewards = list(await function(prompts=prompts, completions=completions, **kwargs))
                guard.check_rewards(name, rewards, prompts, completions)
                return rewards

            return call_later

        def call(*, prompts: Sequence, completions: Sequence, **kwargs: Any) -> list:
            rewards = list(function(prompts=prompts, completions=completions, **kwargs))
            guard.check_rewards(name, rewards, prompts, completions)
            return rewards

        return call

    def graded(inputs: Any, prompts: Sequence, completions: Sequence, ids: Any) -> Tensor:
        functions, names = trainer.reward_funcs, trainer.reward_func_names
        looked_at = [checked(f, n) for f, n in zip(functions, names, strict=True)]
        with replaced(trainer, reward_funcs=looked_at):
            rewards = calculate(inputs, prompts, completions, ids)
        # Of all processes; each looks at its own, whose texts it has.
        first = trainer.accelerator.process_index * len(prompts)
        own = rewards[first : first + len(prompts)]
        for column, (function, name) in enumerate(zip(functions, names, strict=True)):
            values = own[:, column].tolist()
            if not isinstance(function, torch.nn.Module):
                values = [None if math.isnan(value) else value for value in values]
            guard.check_rewards(name, values, prompts, completions)
        return rewards

    return graded


def _all_finite(numbers: Sequence[Tensor]) -> bool:
    """Of 0-d tensors, in one transfer."""
    if not numbers:
        return True
    device = numbers[0].device
    return bool(torch.stack([n.to(device, torch.float32) for n in numbers]).isfinite().all())


def _first(values: Tensor) -> tuple[int, ...] | None:
    bad = (~values.isfinite()).nonzero()
    return tuple(bad[0].tolist()) if len(bad) else None
