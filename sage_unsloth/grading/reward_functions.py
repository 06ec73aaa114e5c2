"""Rewards of one's own, beside the checked answer or in its place.

A reward is a function in TRL's form: `f(prompts, completions, **columns) -> list[float]`, where
`prompts` and `completions` are conversations and each column of the data is a list of a value per
completion. The total reward of a completion is the sum of its rewards times their weights; a reward
may be None where it has nothing to say of a completion.
"""

import asyncio
import faulthandler
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.references import OwnFunction, describe_function, find_function

ANSWER = "answer"
"""Names the checked answer among rewards: 1 for a correct one, else 0."""
OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric")
GIVEN = ("prompts", "completions", *OF_TRL)
"""Arguments that are no columns of the data."""
UNINTERRUPTED = 30.0
"""Seconds after its time limit at which a function that even holds Python's lock ends the run."""
_RESERVED = {grade.value for grade in Grade}  # counts of these are logged under the same path


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward of a run.

    Attributes:
        function: of one's own, in TRL's form; None for the checked answer.
        weight: its factor in the total reward; 0 logs it only.
        name: under which it is logged; the function's name where it is empty.
    """

    function: Callable[..., Any] | None = None
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"a reward's weight must be a number; got {weight!r}")
        if not math.isfinite(weight):
            raise ValueError(f"a reward's weight must be finite; got {weight}")
        if self.function is not None and not callable(self.function):
            raise ValueError(f"a reward must be a function; got {self.function!r:.200}")
        name = self.name or ANSWER
        if self.function is not None:
            name = self.name or getattr(self.function, "__name__", type(self.function).__name__)
            if name in _RESERVED or name == ANSWER:
                raise ValueError(
                    f"a reward's name must not be {ANSWER} or a grade ({', '.join(_RESERVED)}), "
                    f"which are logged too; got {name!r}; rename the function, or give "
                    "Reward(function=..., name=...)"
                )
        object.__setattr__(self, "name", name)

    @property
    def own(self) -> OwnFunction | None:
        """The function with its reference and the digest of its source."""
        return None if self.function is None else describe_function(self.function)


def get_rewards(
    wanted: Sequence[str | Callable[..., Any] | Reward] | None,
) -> tuple[Reward, ...]:
    """The rewards of a run: exactly those that are named; without any, the checked answer alone.

    Args:
        wanted: `Reward`s, functions, or texts `answer` and `module:function`, each with `=WEIGHT`
            behind it for another weight than 1.

    Raises:
        ValueError: a text of another form, a function that cannot be imported, two of one name, or
            no weight but 0.
    """
    if wanted is None or (not isinstance(wanted, str) and not wanted):
        return (Reward(),)
    if isinstance(wanted, str):
        raise ValueError(f"rewards must be a list; got the text {wanted!r}; write [{wanted!r}]")
    rewards = tuple(_reward(item) for item in wanted)
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names):
        raise ValueError(
            f"rewards must have names of their own, under which they are logged; got "
            f"{', '.join(names)}; rename a function, or give Reward(function=..., name=...)"
        )
    if not any(reward.weight for reward in rewards):
        raise ValueError(
            f"a reward must have another weight than 0; got {', '.join(names)} with 0 each; there "
            "would be nothing to learn"
        )
    return rewards


def _reward(item: str | Callable[..., Any] | Reward) -> Reward:
    if isinstance(item, Reward):
        return item
    if not isinstance(item, str):
        return Reward(function=item)
    reference, equals, weight = item.partition("=")
    try:
        value = float(weight) if equals else 1.0
    except ValueError:
        raise ValueError(
            f"a reward is {ANSWER} or module:function, with =WEIGHT behind it; got {item!r}, whose "
            "weight is no number"
        ) from None
    if reference == ANSWER:
        return Reward(weight=value)
    return Reward(function=find_function(reference, "a reward").function, weight=value)


def recorded_rewards(rewards: Sequence[Reward]) -> list[dict[str, Any]] | None:
    """As `run.json` has them; None for the checked answer alone, which needs no record."""
    if [(reward.function, reward.weight) for reward in rewards] == [(None, 1.0)]:
        return None
    found = []
    for reward in rewards:
        own = reward.own
        source = {} if own is None else {"function": own.reference, "source": own.digest}
        found.append({"name": reward.name, "weight": float(reward.weight)} | source)
    return found


def check_columns_of(rewards: Sequence[Reward], columns: Mapping[str, Any]) -> None:
    """Raises ValueError where a function has a parameter that is no column of the data.

    Args:
        rewards: of the run.
        columns: of the first row, as the trainer gets it.
    """
    for reward in rewards:
        if reward.function is None:
            continue
        there = sorted(set(columns) - {"prompt"})
        lacking = [name for name in _required(reward.function) if name not in there]
        if lacking:
            raise ValueError(
                f"the parameters of a reward are prompts, completions, {', '.join(OF_TRL)} and "
                f"columns of the data; {reward.name} needs {', '.join(lacking)}, and the data have "
                f"{', '.join(there) or 'no column'}; rename the parameter or the column, or give "
                "it a default"
            )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ValueError(f"a reward must have a signature; got {function!r:.200}") from None


def _required(function: Callable[..., Any]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty and parameter.kind in named and name not in GIVEN
    ]


class OwnReward:
    """A reward function as TRL calls it, which stops the run with its name where it fails.

    Attributes:
        last_batch: `prompt`, `completion` and `reward` of each completion of the last call.

    Args:
        reward: with a function.
        seconds: time limit of one call.
    """

    def __init__(self, reward: Reward, seconds: float) -> None:
        assert reward.function is not None
        self.function, self.name, self.seconds = reward.function, reward.name, seconds
        self.__name__ = reward.name  # TRL names its metric after it
        self.required_columns = tuple(_required(reward.function))
        self.last_batch: list[dict] = []
        parameters = _parameters(reward.function)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._takes = None if open_ended else set(parameters)
        self._sum, self._count = 0.0, 0

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """One reward for each completion, checked.

        Raises:
            ValueError: the function raised, took too long, or returned something else.
        """
        given = {"prompts": prompts, "completions": completions} | columns
        if self._takes is not None:
            given = {name: value for name, value in given.items() if name in self._takes}
        values = _checked(self.name, self._call(given), len(completions))
        self.last_batch = [
            {"prompt": _last(prompt), "completion": _last(completion), "reward": value}
            for prompt, completion, value in zip(prompts, completions, values, strict=True)
        ]
        self._add(self.last_batch, 1)
        return values

    def _call(self, given: dict[str, Any]) -> Any:
        """The function's value, from a thread that is waited for no longer than its time."""
        box: list[tuple[bool, Any]] = []
        setting = _torch_setting()

        def call() -> None:
            try:
                with setting():
                    value = self.function(**given)
                    if inspect.isawaitable(value):
                        value = asyncio.run(_awaited(value))
                box.append((True, value))
            except BaseException as error:
                box.append((False, error))

        thread = threading.Thread(target=call, name=f"reward {self.name}", daemon=True)
        with _ended_after(self.seconds + UNINTERRUPTED):
            thread.start()
            thread.join(self.seconds)
        if not box:
            raise ValueError(
                f"the reward {self.name} must return within {self.seconds:g} s a call; it did not; "
                "mend it, or set reward_seconds=… (its thread runs on until this process ends)"
            )
        returned, value = box[0]
        if returned:
            return value
        if isinstance(value, KeyboardInterrupt):
            raise value
        raise ValueError(
            f"the reward {self.name} must return a list of numbers; it raised "
            f"{type(value).__name__}: {value!s:.500}; mend it, and run the same command again, "
            "which resumes"
        ) from value

    def forget(self, dropped: Sequence[dict], batch: list[dict]) -> None:
        """Takes completions that are not trained on out of the mean (`resampling`)."""
        self._add(dropped, -1)
        self.last_batch = batch

    def _add(self, rows: Sequence[dict], sign: int) -> None:
        values = [row["reward"] for row in rows if row["reward"] is not None]
        self._sum += sign * sum(values)
        self._count += sign * len(values)

    def pop_mean(self) -> tuple[float, int]:
        """The sum of the rewards since the last call, and of how many."""
        found, self._sum, self._count = (self._sum, self._count), 0.0, 0
        return found


async def _awaited(value: Any) -> Any:
    return await value


def _checked(name: str, values: Any, count: int) -> list[float | None]:
    """The values as numbers, None where the function has nothing to say.

    Raises:
        ValueError: of another length, or one is no finite number.
    """
    try:
        values = list(values)
    except TypeError:
        raise ValueError(
            f"the reward {name} must return a list of a number per completion; got {values!r:.200}"
        ) from None
    if len(values) != count:
        raise ValueError(
            f"the reward {name} must return a number for each of the {count} completions; it "
            f"returned {len(values)}"
        )
    return [None if value is None else _number(name, i, value) for i, value in enumerate(values)]


def _number(name: str, place: int, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"the reward {name} must return finite numbers, or None where it has nothing to say; "
            f"completion {place} got {value!r:.100}"
        )
    return number


@contextmanager
def _ended_after(seconds: float):
    """Ends the process, with every thread's stack on stderr, if what is inside takes longer: code
    in C that holds Python's lock can be told nothing.
    """
    watching = False
    with suppress(ValueError, OSError, RuntimeError, AttributeError):  # stderr may be no file
        faulthandler.dump_traceback_later(seconds, exit=True, file=cast(IO, sys.__stderr__))
        watching = True
    try:
        yield
    finally:
        if watching:
            faulthandler.cancel_dump_traceback_later()


def _torch_setting() -> Callable[[], Any]:
    """What of PyTorch's settings belongs to a thread, as this one has it: gradients, device."""
    torch = sys.modules.get("torch")
    if torch is None:
        return suppress
    grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def setting() -> Any:
        if device is not None:
            torch.cuda.set_device(device)
        return torch.set_grad_enabled(grad)

    return setting


def _last(turns: Any) -> str:
    """A text as it is; of a list of messages the last one's content."""
    return (turns[-1]["content"] if turns else "") if isinstance(turns, list) else turns
