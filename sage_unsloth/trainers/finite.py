"""Stops a run before a number that is not finite reaches its weights, and saves the batch.

    rewards      of each reward function; None, TRL's "no reward", is allowed
    signals      per micro-batch: log-probs of policy, reference and teacher, entropies, log q,
                 advantages
    loss         of each micro-batch
    gradients    after each backward pass, before they are clipped and applied
    weights      the trained ones after each optimizer step, before a checkpoint

TRL and transformers ignore these: a reward of nan or inf becomes an advantage of 0, a nan loss is
logged as the mean of those before it, and AdamW turns a nan gradient into a nan weight. Here the
sum or norm of each tensor is checked, all of a micro-batch in one transfer from the device;
elements only if that one is not finite. None of it runs in compiled code.

Under fp16 the loss is scaled, and a gradient that overflows makes the scaler skip the step and
halve the scale: so a gradient counts only once the scale is down to 1. vLLM's log-probabilities are
not checked: Unsloth handles those itself.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.runs.record import environment
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.bad_batch import save_bad_batch
from sage_unsloth.trainers.data_parallel import check_same_gradients, own_part, shares_model
from sage_unsloth.trainers.listening import Listener, listen
from sage_unsloth.trainers.replaced import replace_attributes, with_callback

BAD_BATCH = "bad_batch"
"""Folder in the trainer's `output_dir`; `bad_batch_1` for the second of several processes."""
REMEDIES = {
    "reward": "Repair that reward function, or let it return None where there is no reward",
    "gradient": "A lower learning rate or max_grad_norm, or bf16 instead of fp16, helps most often",
    "weight": "Lower the learning rate",
}


class NotFiniteError(ValueError):
    """A number of a training step is nan or inf."""


class Guard:
    """The checks while `finite_only` is open; `guided_kl` adds the signals of the loss."""

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
        """Tensors by name, each (B,) or (B, T), of which only the mask's tokens count."""
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
                selected = {k: v for k, v in signals.items() if v is not None} | {"mask": mask}
                value, (row, *column) = values[place].item(), place
                token = [int(valid[row, : column[0]].sum())] if column else []
                self._stop("signal", name, value, (row, *token), signals=selected)

    def check_backward(self, loss: Tensor) -> None:
        """Checks the loss of one micro-batch, and the gradients accumulated so far."""
        weights = self._weights()
        gradients = [(n, own_part(p.grad)) for n, p in weights if p.grad is not None]
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
        trained = [(name, own_part(weight.detach())) for name, weight in self._weights()]
        if _all_finite(torch._foreach_norm([weight for _, weight in trained])):
            return
        for name, weight in trained:
            place = _first(weight)
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
        axes = ("row", "token") if kind in ("signal", "reward") else ("index",) * len(place)
        where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, place, strict=False))
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
            save_bad_batch(
                folder,
                record,
                inputs={} if texts else self.inputs,
                signals=signals or {},
                texts=texts or {},
                weights={name: own_part(p.detach()) for name, p in self._weights()},
            )
            selected = f"Its batch is kept in {folder} (sage_unsloth.trainers.reproduce)"
        except Exception as error:  # a full disk must not hide the nan
            selected = f"Its batch could not be kept: {type(error).__name__}: {error!s:.200}"
        done = (
            "the step has been made, and no checkpoint has it"
            if kind == "weight"
            else "the weights are as before it"
        )
        remedy = REMEDIES.get(
            kind, "See whether a lower learning rate, or bf16 instead of fp16, keeps it finite"
        )
        raise NotFiniteError(
            f"every number of a training step must be finite, but in step {step}, {what} is "
            f"{value}{' at ' if where else ''}{where} ({done}). {selected}. {remedy}. The same "
            "command resumes from the last checkpoint, other settings need a new --out"
        )


@contextmanager
def finite_only(trainer: Any) -> Iterator[Guard]:
    """Within this context, training stops at the first number that is not finite.

    `guided_kl` opens it by itself.

    Args:
        trainer: any transformers `Trainer`; of a GRPO trainer the rewards too.

    Raises:
        NotFiniteError: naming the step, the tensor and the place. The batch is in `bad_batch`
            within `trainer.args.output_dir`: `batch.json` (what, where, in which step),
            `batch.safetensors` (the inputs of `compute_loss`, and the signals) and
            `weights.safetensors` (the trained weights); for a bad reward the prompts, completions
            and rewards. See `reproduce`.
    """
    from transformers import TrainerCallback

    guard = Guard(trainer)

    class Watch(TrainerCallback):
        # Each process has gradients of its own where it has a part of the model of its own.
        compared = trainer.accelerator.num_processes == 1 or shares_model(trainer.accelerator)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.compared:
                check_same_gradients(trainer, trainer.model.parameters())
                self.compared = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            guard.check_weights()

    def compute(proceed: Callable, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        guard.inputs = inputs
        return proceed(model, inputs, *args, **kwargs)

    def step(proceed: Callable, *args: Any, **kwargs: Any) -> Tensor:
        loss = proceed(*args, **kwargs)
        guard.check_backward(loss)
        return loss

    listeners: dict[str, Listener] = {names.COMPUTE_LOSS: compute, names.STEP: step}
    if hasattr(trainer, names.REWARDS):
        listeners[names.REWARDS] = _checked_rewards(trainer, guard)
    with listen(trainer, "finite", **listeners), with_callback(trainer, Watch()):
        yield guard


def _checked_rewards(trainer: Any, guard: Guard) -> Listener:
    """Checks what each function returns during grading, where None and nan still differ."""

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

    def graded(
        proceed: Callable, inputs: Any, prompts: Sequence, completions: Sequence, ids: Any
    ) -> Tensor:
        functions = [*zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)]
        with replace_attributes(trainer, reward_funcs=[checked(f, n) for f, n in functions]):
            rewards = proceed(inputs, prompts, completions, ids)
        # Of all processes; each looks at its own, whose texts it has.
        first = trainer.accelerator.process_index * len(prompts)
        own = rewards[first : first + len(prompts)]
        for column, (function, name) in enumerate(functions):
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
