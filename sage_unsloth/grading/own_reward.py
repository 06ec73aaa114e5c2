"""Calls a user's reward function: with a time limit, and with its values checked."""

import asyncio
import faulthandler
import inspect
import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from sage_unsloth.grading.reward_functions import (
    OF_TRL,
    Reward,
    function_parameters,
    parameters_without_default,
)
from sage_unsloth.own_code import describe_exception, error_place, own_frames

UNINTERRUPTED = 30.0
"""Seconds after its time limit at which a function that holds the GIL ends the run."""

logger = logging.getLogger(__name__)


class OwnReward:
    """A user's reward function as TRL calls it; an error in it stops the run with its name.

    Attributes:
        last_batch: `prompt`, `completion` and `reward` of each completion of the last call.

    Args:
        reward: must have a function.
    """

    def __init__(self, reward: Reward, seconds: float) -> None:
        assert reward.function is not None
        self.function, self.name, self.seconds = reward.function, reward.name, seconds
        self.__name__ = reward.name  # TRL names its metric after it
        self.required_columns = tuple(parameters_without_default(reward.function))
        self.last_batch: list[dict] = []
        parameters = function_parameters(reward.function)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._takes = None if open_ended else set(parameters)
        self._sum, self._count = 0.0, 0

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """One checked reward for each completion.

        Raises:
            ValueError: the function raised, took too long, or returned an invalid value.
        """
        given = {"prompts": prompts, "completions": completions} | columns
        if self._takes is not None:
            given = {name: value for name, value in given.items() if name in self._takes}
        values = _check_values(self.name, self._call(given), len(completions))
        self.last_batch = [
            {"prompt": _last(prompt), "completion": _last(completion), "reward": value}
            for prompt, completion, value in zip(prompts, completions, values, strict=True)
        ]
        self._add(self.last_batch, 1)
        return values

    def _call(self, given: dict[str, Any]) -> Any:
        """The function's value, computed in a thread so that the time limit can be kept."""
        box: list[tuple[bool, Any]] = []
        setting = _torch_setting()

        def call() -> None:
            try:
                # Gradient mode and device belong to a thread, so the new one takes the caller's.
                with setting():
                    value = self.function(**given)
                    if inspect.isawaitable(value):
                        value = asyncio.run(_awaited(value))
                box.append((True, value))
            except BaseException as error:
                box.append((False, error))

        # A daemon: a function that never returns must not keep the process alive.
        thread = threading.Thread(target=call, name=f"reward {self.name}", daemon=True)
        with _end_process_after(self.seconds + UNINTERRUPTED):
            thread.start()
            thread.join(self.seconds)
        if not box:
            frame = sys._current_frames().get(thread.ident or 0)
            stack = traceback.extract_stack(frame) if frame is not None else []
            raise ValueError(
                f"the reward {self.name} must return within {self.seconds:g} s a call, but it was "
                f"still running{error_place(stack)}. Fix it, or set reward_seconds=… (its thread "
                "runs on until this process ends)"
            )
        returned, value = box[0]
        if returned:
            return value
        # Ctrl-C inside the function is the user's, not an error of the reward.
        if isinstance(value, KeyboardInterrupt):
            raise value
        frames = own_frames(traceback.extract_tb(value.__traceback__))
        logger.error(
            "the reward %s raised %s:\n%s",
            self.name,
            type(value).__name__,
            "".join(traceback.format_list(frames)),
        )
        raise ValueError(
            f"the reward {self.name} must return a list of numbers, but it raised "
            f"{describe_exception(value)}. The same command resumes"
        ) from value

    def forget(self, dropped: Sequence[dict], batch: list[dict]) -> None:
        """Removes completions that are not trained on from the mean (`resampling`)."""
        self._add(dropped, -1)
        self.last_batch = batch

    def _add(self, rows: Sequence[dict], sign: int) -> None:
        values = [row["reward"] for row in rows if row["reward"] is not None]
        self._sum += sign * sum(values)
        self._count += sign * len(values)

    def pop_mean(self) -> tuple[float, int]:
        """The sum and the count of the rewards since the last call."""
        mean, self._sum, self._count = (self._sum, self._count), 0.0, 0
        return mean


def try_reward(reward: Reward, row: Mapping[str, Any], seconds: float) -> None:
    """Calls a function with two made-up completions of one row, before anything is loaded.

    A function with a parameter that only a trainer provides (`OF_TRL`) is not called. An exception
    is ignored if the function takes `**columns`, where it may look for such values.

    Raises:
        ValueError: as in training.
    """
    if reward.function is None:
        return
    parameters = function_parameters(reward.function)
    if any(name in OF_TRL for name in parameters):
        return
    called = OwnReward(reward, seconds)
    columns = {name: [value] * 2 for name, value in row.items() if name != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in ("0", "1")]
    given = {"prompts": [row["prompt"]] * 2, "completions": completions} | columns
    try:
        called(**given)
    except ValueError as error:
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if error.__cause__ is None or not open_ended:
            raise


async def _awaited(value: Any) -> Any:
    return await value


def _check_values(name: str, values: Any, count: int) -> list[float | None]:
    """The values as numbers; None for no reward.

    Raises:
        ValueError: a wrong length, or a value that is not a finite number.
    """
    try:
        values = list(values)
    except TypeError:
        raise ValueError(
            f"the reward {name} must return a list with a number per completion, got "
            f"{values!r:.200}"
        ) from None
    if len(values) != count:
        raise ValueError(
            f"the reward {name} must return a number for each of the {count} completions, but "
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
            f"the reward {name} must return finite numbers or None, but gave completion {place} "
            f"{value!r:.100}"
        )
    return number


@contextmanager
def _end_process_after(seconds: float):
    """Ends the process, printing every thread's stack to stderr, if the body takes longer.

    Code in C that holds the GIL cannot be interrupted in another way.
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
    """PyTorch's settings of this thread (gradient mode, device), for another thread."""
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
    """A text as it is; of a list of messages the last content."""
    return (turns[-1]["content"] if turns else "") if isinstance(turns, list) else turns
