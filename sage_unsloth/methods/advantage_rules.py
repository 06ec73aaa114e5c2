"""Advantage rules by name: `"pkpo,k=4"`, or `"module:function"` for a custom one.

A rule is a function of the rewards of P groups of G, (P, G) -> (P, G), see `group_advantages`. It
gets these if it has keyword arguments of their names:

    mean_logps       mean token log π_old of each completion, nats, (P, G)
    step, max_steps  the optimizer step, and the number of steps

Every other keyword argument is a setting, with a default.
"""

import ast
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from sage_unsloth.methods import group_advantages
from sage_unsloth.own_code import named_object

GRPO = "grpo"
RULES: dict[str, Callable[..., Tensor]] = {
    GRPO: group_advantages.grpo,
    "maxrl": group_advantages.maxrl,
    "nsr": group_advantages.nsr,
    "w-reinforce": group_advantages.w_reinforce,
    "pkpo": group_advantages.pkpo,
    "maxpo": group_advantages.maxpo,
    "pass-at-k": group_advantages.pass_at_k_advantages,
    "rs-grpo": group_advantages.rs_grpo,
    "unlikeliness": group_advantages.unlikeliness,
    "f-grpo": group_advantages.f_grpo,
    "ucpo": group_advantages.ucpo,
}
"""By name; "grpo" is the trainer's own."""
RULE_SIGNALS = ("mean_logps", "step", "max_steps")
"""Keyword arguments that the trainer provides."""


@dataclass(frozen=True)
class AdvantageRule:
    """A rule with its settings.

    Attributes:
        text: as named, "pkpo,k=4".
        function: of the rewards, see the module's docstring.
        settings: given keyword arguments of the function.
    """

    text: str
    function: Callable[..., Tensor]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_grpo(self) -> bool:
        """Whether it is the trainer's own."""
        return self.function is group_advantages.grpo

    @property
    def is_ours(self) -> bool:
        """Whether it is one of `RULES`."""
        return self.function in RULES.values()

    @property
    def needs(self) -> set[str]:
        """The `RULE_SIGNALS` that the function has arguments for."""
        return {*RULE_SIGNALS} & {*inspect.signature(self.function).parameters}

    def __call__(self, rewards: Tensor, **signals: Any) -> Tensor:
        """The advantages of the rewards, (P, G); `signals` has at least those that it `needs`.

        Raises:
            ValueError: a reward or a setting that the rule does not support, or a custom rule that
                did not return finite advantages, (P, G).
        """
        given = {name: signals[name] for name in self.needs}
        # A copy, since a rule of the user may write into it, and TRL logs the rewards afterwards.
        result = self.function(rewards.clone(), **given, **self.settings)
        fits = isinstance(result, Tensor) and result.shape == rewards.shape
        if not fits or not result.is_floating_point() or not result.isfinite().all():
            raise ValueError(
                f"a rule must return a finite advantage for each reward, {tuple(rewards.shape)}, "
                f"got {result!r:.100} from advantages={self.text!r}"
            )
        return result.detach().to(rewards.dtype)

    def teaches(self, rewards: Tensor, *, step: int = 0, max_steps: int = 1) -> Tensor:
        """Whether a group has an advantage that is not 0, bool (P,).

        Completions get different likelihoods, so that a rule that ranks them has ranks.

        Args:
            rewards: (P, G).
        """
        # Any different numbers do: whether a group teaches does not depend on which.
        ranks = -1.0 - torch.arange(rewards.shape[1], device=rewards.device).expand(rewards.shape)
        result = self(rewards, mean_logps=ranks, step=step, max_steps=max_steps)
        return (result != 0).any(1)

    def silent_counts(self, num_generations: int) -> list[int]:
        """The numbers of correct answers for which all advantages of a group are 0.

        Raises:
            ValueError: the rule does not support groups of that size.
        """
        numbers = torch.arange(num_generations)
        # Row c has c right answers.
        rewards = (numbers < torch.arange(num_generations + 1).unsqueeze(1)).float()
        return [c for c, taught in enumerate(self.teaches(rewards).tolist()) if not taught]


GRPO_RULE = AdvantageRule(GRPO, group_advantages.grpo)

Rule = str | AdvantageRule | Callable[..., Tensor]
"""An argument of `advantage_rule`."""


def advantage_rule(rule: Rule) -> AdvantageRule:
    """The rule of a name with settings.

    Args:
        rule: `"pkpo"`, `"pkpo,k=4,k_last=1"`, `"module:function,setting=1"`, or a function.

    Raises:
        ValueError: an unknown rule or setting, or not NAME=VALUE.
    """
    if isinstance(rule, AdvantageRule):
        return rule
    if not isinstance(rule, str):
        name = getattr(rule, "__qualname__", type(rule).__qualname__)
        return AdvantageRule(name, _checked_function(rule, name))
    name, *texts = (part.strip() for part in rule.split(","))
    if name in RULES:
        function = RULES[name]
    elif ":" in name:
        function = _checked_function(named_object(name, "a rule for advantages"), name)
    else:
        raise ValueError(
            f"advantages must be one of {', '.join(RULES)}, or your own module:function, got "
            f"{rule!r}"
        )
    known = [*inspect.signature(function).parameters][1:]
    known = [parameter for parameter in known if parameter not in RULE_SIGNALS]
    settings = rule_settings(texts, known, f"advantages={name!r}")
    return AdvantageRule(",".join((name, *texts)), function, settings)


def check_rule(rule: Rule, num_generations: int, *, any_reward: bool = False) -> None:
    """Checks on examples that a rule can learn from groups of that size.

    Args:
        rule: see `advantage_rule`.
        any_reward: rewards may differ from 0 and 1.

    Raises:
        ValueError: see `advantage_rule`; a setting that the group size does not allow; or all
            advantages are always 0.
    """
    rule = advantage_rule(rule)
    if len(rule.silent_counts(num_generations)) == num_generations + 1:
        raise ValueError(
            f"advantages={rule.text!r} gives every completion in groups of {num_generations} the "
            "advantage 0, whatever its rewards of 0 and 1. Change its settings, or num_generations"
        )
    if any_reward:
        try:
            rule.teaches(torch.linspace(-1, 1, num_generations).unsqueeze(0))
        except ValueError as error:
            raise ValueError(f"kl_in='reward' makes rewards of any size, but {error}") from None


def _checked_function(function: Any, name: str) -> Callable[..., Tensor]:
    if not callable(function) or isinstance(function, type):
        raise ValueError(
            f"a rule for advantages must be a function of the rewards (P, G), got {name}, "
            f"{function!r:.100}"
        )
    parameters = [*inspect.signature(function).parameters.values()]
    open_ones = [
        p.name
        for p in parameters[1:]
        if (p.default is p.empty and p.name not in RULE_SIGNALS) or p.kind is p.POSITIONAL_ONLY
    ]
    if not parameters or open_ones:
        raise ValueError(
            f"a rule for advantages takes the rewards, {', '.join(RULE_SIGNALS)} by name, and "
            f"arguments with a default, but {name} has {inspect.signature(function)}"
        )
    return cast(Callable[..., Tensor], function)


def rule_settings(texts: Iterable[str], known: Collection[str], rule: str) -> dict[str, Any]:
    """`["k=4"]` as keyword arguments of a rule's function.

    Args:
        texts: the settings after the rule's name.

    Raises:
        ValueError: not NAME=VALUE, an unknown setting, or not a number.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or key not in known:
            raise ValueError(
                f"settings of {rule} are NAME=VALUE of {', '.join(known) or 'none'}, got {text!r}"
            )
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{key} of {rule} must be a number, got {value!r}") from None
        if type(settings[key]) not in (int, float):
            raise ValueError(f"{key} of {rule} must be a number, got {value}")
    return settings
