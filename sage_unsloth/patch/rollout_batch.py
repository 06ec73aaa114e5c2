"""Signals of the reference and the teacher, computed once for each rollout batch.

The trainer scores the reference without gradient before the first update on a batch, and keeps only
its log-probabilities. Here

    ref_entropies    come from that same scoring
    teacher_logps    come from one more scoring of the batch, by the frozen teacher
    groups           number the prompts, so that a completion finds the others of its prompt after
                     the batch was shuffled

They are added to the batch with a row per completion, so TRL shuffles and splits them with the
rest. `Scoring` is how a trainer scores, and in which layout: `unsloth_scoring.py`,
`trl_scoring.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import listening
from sage_unsloth.trainers.trainer_names import ContractError

KEY_PREFIX = "sage_"
GROUPS_KEY = f"{KEY_PREFIX}groups"


class Scoring(Protocol):
    """How a trainer scores a rollout batch, and in which layout."""

    def check(self, trainer: Any) -> None:
        """Raises ContractError if it scores in another way than was tested."""
        ...

    def prepare(
        self, trainer: Any, *, with_entropies: bool, teacher: Any
    ) -> AbstractContextManager:
        """Within it, the trainer can score the reference, and a teacher that is a model."""
        ...

    def score_with_entropies(
        self, score: Callable[..., tuple], with_entropies: bool, *args: Any, **kwargs: Any
    ) -> tuple[tuple, Callable[[], Tensor]]:
        """The result of `score`, and what gives the entropies in the same layout."""
        ...

    def in_completion_layout(self, logps: Tensor, batch: dict[str, Any]) -> Tensor:
        """(B, T) float32, 0 outside the mask, from log-probs in the trainer's layout."""
        ...


@contextmanager
def rollout_signals(
    trainer: Any,
    needs: set[str],
    *,
    scoring: Scoring,
    teacher: Any = None,
) -> Iterator[dict[str, Tensor]]:
    """Within this context, each rollout batch of `trainer` has the signals in `needs`.

    Yields a dict that holds, during each call of the loss, those of its micro-batch:
    "ref_entropies" and "teacher_logps" in the layout of the loss's `ref_logps`, "groups" (B,).

    Args:
        needs: of `signals.OPTIONAL_SIGNALS`, and "groups"; "entropies" is computed by the loss
            instead.
        teacher: a frozen model, or the name of a frozen adapter; for "teacher_logps".

    Raises:
        ContractError: the trainer's functions differ, or it scores in an unknown way.
    """
    scored_ones, groups = needs & {"ref_entropies", "teacher_logps"}, "groups" in needs
    current: dict[str, Tensor] = {}
    if not scored_ones and not groups:
        yield current
        return
    scoring.check(trainer)
    last: dict[str, Any] = {}

    def score(proceed: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        result, entropies = scoring.score_with_entropies(
            proceed, "ref_entropies" in needs, *args, **kwargs
        )
        # Only the last call counts: π_old is scored before the reference, by the same function.
        last.update(result=result, entropies=entropies, args=args[1:], kwargs=kwargs)
        return result

    def roll_out(proceed: Callable[..., dict], inputs: Any) -> dict[str, Any]:
        last.clear()
        # Elsewhere the trainer scores as it did: the loss needs nothing of this.
        with listening(trainer, "signals", **{names.SCORE: score}):
            batch = proceed(inputs)
        ref_logps = batch.get("ref_per_token_logps")
        # Identity and not equality: at step 0 policy and reference score alike.
        if scored_ones and (ref_logps is None or last["result"][0] is not ref_logps):
            raise ContractError(
                f"the last {names.SCORE} of {names.ROLLOUT} must score the reference",
                actual="another" if last else "none",
                expected="ref_per_token_logps",
            )
        if "ref_entropies" in needs:
            batch[f"{KEY_PREFIX}ref_entropies"] = last["entropies"]()
        if "teacher_logps" in needs:
            with torch.no_grad(), _as_teacher(trainer, teacher) as model:
                by_teacher = getattr(trainer, names.SCORE)(model, *last["args"], **last["kwargs"])
            batch[f"{KEY_PREFIX}teacher_logps"] = by_teacher[0]
        if groups:
            # Here, since after this TRL shuffles the rows and splits them.
            batch[GROUPS_KEY] = _groups(trainer, batch)
        return batch

    def compute_loss(
        proceed: Callable[..., Any], model: Any, inputs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        current.clear()
        current.update(
            {k.removeprefix(KEY_PREFIX): v for k, v in inputs.items() if k.startswith(KEY_PREFIX)}
        )
        return proceed(model, inputs, *args, **kwargs)

    # A batch that the trainer kept from a train() before this context lacks what is added here.
    setattr(trainer, names.BUFFER, None)
    model = None if isinstance(teacher, str) else teacher
    with (
        scoring.prepare(trainer, with_entropies="ref_entropies" in needs, teacher=model),
        listening(
            trainer, "signals", **{names.ROLLOUT: roll_out, names.COMPUTE_LOSS: compute_loss}
        ),
    ):
        yield current


@contextmanager
def _as_teacher(trainer: Any, teacher: Any) -> Iterator[Any]:
    """The model that scores as the teacher: its own, or the policy's with the teacher's adapter."""
    if not isinstance(teacher, str):
        yield teacher
        return
    from trl.trainer.utils import use_adapter

    with use_adapter(trainer.accelerator.unwrap_model(trainer.model), teacher):
        yield trainer.model


def _groups(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """A number for each completion, (B,), equal for those of one prompt.

    TRL puts the completions of a prompt next to each other.
    """
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    prompts = batch["prompt_ids"]
    if (
        len(prompts) % size
        or (prompts.view(-1, size, prompts.shape[1]) != prompts[::size, None]).any()
    ):
        raise ContractError(
            "the completions of a prompt must be side by side in one process's rollout batch",
            actual=f"{len(prompts)} rows whose prompts change otherwise",
            expected=f"blocks of {size} rows with one prompt",
        )
    return torch.arange(len(prompts), device=prompts.device) // size
