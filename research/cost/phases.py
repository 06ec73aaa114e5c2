"""Where the time of an optimizer step goes."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from sage_unsloth.models.meter import synchronize

# Phases of an optimizer step, each a method of the trainer; backward is accelerate's, the rest is
# "other".
PHASES = {
    "rollout": "_generate",
    "reward": "_calculate_rewards",
    "reference": "_get_per_token_logps_and_entropies",
    "loss": "compute_loss",
}


@contextlib.contextmanager
def timed_phases(trainer: Any) -> Iterator[dict[str, float]]:
    """Seconds in each phase by the clock; a phase within another counts for the inner one."""
    seconds: dict[str, float] = defaultdict(float)
    inside: list[float] = []

    def timed(name: str, method: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            inside.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                synchronize()
                elapsed = time.perf_counter() - started
                seconds[name] += elapsed - inside.pop()
                if inside:
                    inside[-1] += elapsed

        return wrapper

    places = [(trainer, method, name) for name, method in PHASES.items()]
    places.append((trainer.accelerator, "backward", "backward"))
    own = {(id(place), method): vars(place).get(method) for place, method, _ in places}
    for place, method, name in places:
        setattr(place, method, timed(name, getattr(place, method)))
    try:
        yield seconds
    finally:
        for place, method, _ in places:
            if own[id(place), method] is None:
                delattr(place, method)
            else:
                setattr(place, method, own[id(place), method])
