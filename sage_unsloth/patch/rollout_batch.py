"""What a guide needs of the reference and the teacher, scored once for each rollout batch.

Unsloth scores the reference without gradient before the first update on a batch, and returns its
log-probabilities alone. Here

    ref_entropies    come out of that same scoring: while it runs, the function that turns hidden
                     states or logits into log-probabilities also takes the entropy of each chunk,
                     never of (B, T, V)
    teacher_logps    come from one more scoring of the batch, by the frozen teacher
    groups           number the prompts, so that a completion finds the others of its prompt after
                     the batch was shuffled

They join the batch as further tensors of a row per completion, so TRL shuffles and splits them with
the rest.

Unsloth lays the values of a chunk out as (B, T) in one of several ways: padded rows one below the
other, or one packed row that is scattered in row-major order. Which one it was is found by the
log-probabilities, which must come out bit for bit where they were expected; anything else is a
`ContractError`.
"""

import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_unsloth.patch.replaced import replaced
from sage_unsloth.patch.scoring import scorer
from sage_unsloth.patch.unsloth_names import ContractError

GENERATE = "_generate_and_score_completions"
SCORE = "_get_per_token_logps_and_entropies"
SCORER_WITH_ENTROPY = "chunked_hidden_states_selective_log_softmax_recompute"
OF_HIDDEN_STATES = (
    "chunked_hidden_states_selective_log_softmax",
    "grpo_chunked_hidden_states_logprobs",
    SCORER_WITH_ENTROPY,
)
"""What Unsloth scores hidden states with, by version and setting: 2026.10.7 has the first alone
here, later ones all.
"""
OF_LOGITS = "chunked_selective_log_softmax"
PREFIX = "sage_"
GROUPS = f"{PREFIX}groups"
LOGITS_AT_ONCE = 1 << 26
"""Elements of the float32 copy of the logits that an entropy is taken of at a time."""


class Scored(NamedTuple):
    """One call of a scorer: log-probabilities and entropies of the same tokens, of one shape,
    nats.
    """

    logps: Tensor
    entropies: Tensor


@contextmanager
def rollout_signals(
    trainer: Any, needs: set[str], *, groups: bool = False, teacher: Any = None
) -> Iterator[dict[str, Tensor]]:
    """While open, each rollout batch of `trainer` carries what `needs` names, and the groups if
    asked for.

    Yields a dict that holds, during each call of the loss, what belongs to its micro-batch:
    "ref_entropies" and "teacher_logps" in the layout of the loss's own `ref_logps`, "groups" (B,).

    Args:
        needs: names of `signals.OPTIONAL_SIGNALS`; "entropies" is not of the rollout batch and is
            left to the loss.
        teacher: a frozen model, or the name of a frozen adapter of the trainer's model; for
            "teacher_logps".

    Raises:
        ContractError: the trainer's functions are not as expected, or scored in a way that is not
            known.
    """
    wanted = needs & {"ref_entropies", "teacher_logps"}
    current: dict[str, Tensor] = {}
    if not wanted and not groups:
        yield current
        return
    _check_functions(trainer)
    generate, score, loss = (
        getattr(trainer, GENERATE),
        getattr(trainer, SCORE),
        trainer.compute_loss,
    )
    last: dict[str, Any] = {}

    def scored(model: Any, *args: Any, **kwargs: Any) -> tuple:
        with _recorded("ref_entropies" in wanted) as calls:
            result = score(model, *args, **kwargs)
        last.update(result=result, calls=calls, args=args, kwargs=kwargs)
        return result

    def generated(inputs: Any) -> dict[str, Any]:
        last.clear()
        batch = generate(inputs)
        ref_logps = batch.get("ref_per_token_logps")
        if wanted and (ref_logps is None or last["result"][0] is not ref_logps):
            raise ContractError(
                f"the last {SCORE} of {GENERATE} must score the reference",
                found="another" if last else "none",
                expected="ref_per_token_logps",
            )
        if "ref_entropies" in wanted:
            batch[f"{PREFIX}ref_entropies"] = in_layout(ref_logps, last["calls"])
        if "teacher_logps" in wanted:
            with _as_teacher(trainer, teacher) as model:
                batch[f"{PREFIX}teacher_logps"] = score(model, *last["args"], **last["kwargs"])[0]
        if groups:
            batch[GROUPS] = _groups(trainer, batch)
        return batch

    def compute_loss(model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
        current.clear()
        current.update(
            {k.removeprefix(PREFIX): v for k, v in inputs.items() if k.startswith(PREFIX)}
        )
        return loss(model, inputs, *args, **kwargs)

    # A batch that the trainer kept from a train() before this context lacks what is added here.
    trainer._buffered_inputs = None
    functions = {GENERATE: generated, SCORE: scored, "compute_loss": compute_loss}
    with replaced(trainer, **functions):
        yield current


def in_layout(ref_logps: Tensor, calls: list[Scored]) -> Tensor:
    """The entropies of the scorer's calls where Unsloth put their log-probabilities, (B, T), 0
    where it put none.

    Raises:
        ContractError: the log-probabilities of no call, or calls, are those of `ref_logps`.
    """
    rows: list[Scored] = []
    for call in reversed(calls):
        if call.logps.shape[1:] != ref_logps.shape[1:]:
            break
        rows.insert(0, call)
        if sum(len(c.logps) for c in rows) >= len(ref_logps):
            break
    if rows and torch.equal(torch.cat([c.logps for c in rows]).float(), ref_logps.float()):
        return torch.cat([c.entropies for c in rows])
    places = ref_logps != 0
    for call in reversed(calls):
        logps, entropies = call.logps.flatten().float(), call.entropies.flatten()
        put = logps != 0
        if torch.equal(logps[put], ref_logps[places].float()):
            result = torch.zeros(ref_logps.shape, dtype=entropies.dtype, device=ref_logps.device)
            result[places] = entropies[put].to(ref_logps.device)
            return result
    raise ContractError(
        "the reference's log-probabilities must be those of one scorer's call, scattered in "
        "row-major order, or of several, "
        "a block of rows each",
        found=[tuple(c.logps.shape) for c in calls],
        expected=tuple(ref_logps.shape),
    )


@contextmanager
def _recorded(record: bool) -> Iterator[list[Scored]]:
    """While open, every call of Unsloth's two scorers also takes the entropies of what it
    scores.
    """
    calls: list[Scored] = []
    if not record:
        yield calls
        return
    zoo = importlib.import_module("unsloth_zoo.rl_replacements")
    plain = {
        name: getattr(zoo, name) for name in (*OF_HIDDEN_STATES, OF_LOGITS) if hasattr(zoo, name)
    }
    with_entropy = scorer(plain[SCORER_WITH_ENTROPY], unsloth_asks=False)
    ours = with_entropy is not plain[SCORER_WITH_ENTROPY]

    def of_hidden_states(name: str, *args: Any, **kwargs: Any) -> Tensor:
        whole = {k: v for k, v in kwargs.items() if not k.startswith("support_")}
        with torch.no_grad():
            logps, entropies = with_entropy(*args, **whole, return_entropy=True)
        # The reference must be scored as the policy is, so its log-probs are those of the scorer
        # that was asked: ours are that one's bit for bit (2026.10.7). Over a part of the vocabulary
        # too; the entropy stays the whole's.
        if len(whole) < len(kwargs) or not ours:
            before = len(calls)
            logps = plain[name](*args, **kwargs)
            del calls[before:]
        calls.append(Scored(logps, entropies))
        return logps

    def of_logits(
        logits: Tensor, index: Tensor, temperature: float = 1.0, *args: Any, **kwargs: Any
    ) -> Tensor:
        logps = plain[OF_LOGITS](logits, index, temperature, *args, **kwargs)
        calls.append(Scored(logps, entropies_of_logits(logits, temperature)))
        return logps

    ours_by_name = {name: functools.partial(of_hidden_states, name) for name in plain}
    with replaced(zoo, **ours_by_name | {OF_LOGITS: of_logits}):
        yield calls


@torch.no_grad()
def entropies_of_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H_t of softmax(logits / temperature), nats, (B, T) float32 for (B, T, V), some rows at a
    time.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    parts = []
    for rows in flat.split(max(1, LOGITS_AT_ONCE // flat.shape[-1])):
        log_p = (rows.float() / temperature).log_softmax(-1)
        parts.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])


@contextmanager
def _as_teacher(trainer: Any, teacher: Any) -> Iterator[Any]:
    """The model that scores as the teacher: its own, or the policy's under the teacher's
    adapter.
    """
    if not isinstance(teacher, str):
        yield teacher
        return
    from trl.trainer.utils import use_adapter

    with use_adapter(trainer.accelerator.unwrap_model(trainer.model), teacher):
        yield trainer.model


def _groups(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """A number for each completion, equal for those of one prompt, (B,): TRL puts a prompt's
    completions side by side.
    """
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    prompts = batch["prompt_ids"]
    if (
        len(prompts) % size
        or (prompts.view(-1, size, prompts.shape[1]) != prompts[::size, None]).any()
    ):
        raise ContractError(
            "the completions of a prompt must be side by side in one process's rollout batch",
            found=f"{len(prompts)} rows whose prompts change otherwise",
            expected=f"blocks of {size} rows with one prompt",
        )
    return torch.arange(len(prompts), device=prompts.device) // size


def _check_functions(trainer: Any) -> None:
    """The names are there, and the scoring asks for its scorers each time it is called."""
    zoo = importlib.import_module("unsloth_zoo.rl_replacements")
    needed = (OF_HIDDEN_STATES[0], OF_LOGITS, SCORER_WITH_ENTROPY)
    missing = [
        name for name in (GENERATE, SCORE) if not callable(getattr(type(trainer), name, None))
    ]
    missing += [name for name in needed if not hasattr(zoo, name)]
    if missing:
        raise ContractError(
            "the trainer and unsloth_zoo.rl_replacements must have these functions",
            found=f"no {', '.join(missing)}",
            expected=(GENERATE, SCORE, *needed),
        )
    source = inspect.getsource(getattr(type(trainer), SCORE))
    asked = "from unsloth_zoo.rl_replacements import" in source and f"{OF_LOGITS}," in source
    parameters = inspect.signature(getattr(zoo, SCORER_WITH_ENTROPY)).parameters
    if not asked or "return_entropy" not in parameters:
        raise ContractError(
            f"{SCORE} must import its scorers when it is called, and {SCORER_WITH_ENTROPY} must "
            f"return entropies",
            found=f"import {asked}, parameters {tuple(parameters)}",
            expected="import True, return_entropy",
        )
