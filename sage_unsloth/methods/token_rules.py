"""Rules for token advantages by name: `"clip-cov,share=0.001"`, or a custom `"module:function"`.

A rule is a function (signals, advantages) -> advantages, as for `shape` of `guided_kl`.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sage_unsloth.methods import covariance
from sage_unsloth.methods.advantage_rules import rule_settings
from sage_unsloth.objective.advantages import OFFERED, ShapeAdvantages
from sage_unsloth.own_code import named_function
from sage_unsloth.patch.choice import Choice, Method, add_method
from sage_unsloth.patch.trained_with import describe_function

NONE = "none"
TOKEN_RULES: dict[str, ShapeAdvantages] = {
    "clip-cov": covariance.clip_cov,
    "kl-cov": covariance.kl_cov,
}


@contextmanager
def use_token_advantages(trainer: Any, rule: str | ShapeAdvantages | None) -> Iterator[None]:
    """Within this context, a rule changes token advantages in a `guided_kl`, after its `shape`.

        with use_token_advantages(trainer, "kl-cov,share=0.002"), guided_kl(trainer):
            trainer.train()

    Args:
        rule: see `token_rule`; "none" changes nothing.

    Raises:
        ValueError: see `token_rule`; from `guided_kl`, a rule that would change nothing.
    """
    function = token_rule(rule)
    if function is None:
        yield
        return

    def check(trainer: Any, choice: Choice) -> None:
        check_updates(function, updates_of_batch(trainer))

    record = describe_function(function)
    method = Method(name="token_advantages", record=record, check=check, shape=function)
    with add_method(trainer, method):
        yield


def token_rule(text: str | ShapeAdvantages | None) -> ShapeAdvantages | None:
    """The rule of a name with settings; None for "none"; a function is returned as it is.

    Args:
        text: `"clip-cov"`, `"clip-cov,share=0.001"`, or `"module:function,setting=1"`.

    Raises:
        ValueError: an unknown rule or setting, or not NAME=VALUE.
    """
    if text == NONE:
        return None
    if not isinstance(text, str):
        return text
    name, *texts = (part.strip() for part in text.split(","))
    if name in TOKEN_RULES:
        function: Any = TOKEN_RULES[name]
    elif ":" in name:
        function = named_function(name, "a rule for the advantages of tokens").function
    else:
        raise ValueError(
            f"token_advantages must be one of {NONE}, {', '.join(TOKEN_RULES)}, or your own "
            f"module:function, got {text!r}"
        )
    # The first two parameters are the signals and the advantages.
    parameters = [*inspect.signature(function).parameters.values()][2:]
    own = {one.name: one for one in parameters if one.name not in OFFERED}
    settings = rule_settings(texts, [*own], f"token_advantages={name!r}")
    for one in own.values():
        named = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if named and one.default is one.empty and one.name not in settings:
            raise ValueError(
                f"each parameter of {name} without a default must be set, got none for "
                f"{one.name!r}. Add it: {name},{one.name}=VALUE"
            )
    return functools.partial(function, **settings) if settings else function


def check_token_rule(text: str, updates: int) -> None:
    """Raises ValueError for an unknown rule, or for "kl-cov" with one update of each batch."""
    check_updates(token_rule(text), updates)


def check_updates(rule: ShapeAdvantages | None, updates: int) -> None:
    """Raises ValueError for "kl-cov" with a single update of each rollout batch."""
    # `func`: with settings the rule is a functools.partial.
    if getattr(rule, "func", rule) is covariance.kl_cov and updates <= 1:
        raise ValueError(
            "'kl-cov' needs several updates of a rollout batch, because it changes nothing in the "
            f"first, got {updates}. Set num_iterations above 1"
        )


def updates_of_batch(trainer: Any) -> int:
    """Optimizer steps for each rollout batch."""
    args = trainer.args
    # TRL generates once for steps_per_generation micro-batches, of which one update takes some.
    per_pass = args.steps_per_generation // args.gradient_accumulation_steps
    return trainer.num_iterations * max(per_pass, 1)
