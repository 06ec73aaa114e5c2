"""Algorithms that are not in the table: `module:name`, or from installed packages.

A package provides algorithms by entry points:

    [project.entry-points."sage_unsloth.algorithms"]
    sharper = "my_package.algorithms:sharper"
"""

import functools
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from sage_unsloth.methods.advantage_rules import RULES, advantage_rule
from sage_unsloth.methods.token_rules import NONE, token_rule
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.own_code import named_object, source_digest
from sage_unsloth.training.algorithm import Algorithm

GROUP = "sage_unsloth.algorithms"
"""Of the entry points."""


@dataclass(frozen=True)
class Brought:
    """An algorithm of an installed package.

    Attributes:
        name: for `--algorithm`.
        algorithm: None if it is broken.
        problem: why it is broken, or "".
    """

    name: str
    package: str
    algorithm: Algorithm | None = None
    problem: str = ""


def named_algorithm(reference: str) -> Algorithm:
    """The algorithm `name` of `module`, which may be a file in the current folder.

    Args:
        reference: "module:name" of an `Algorithm`, or of a guide, which means grpo with that guide.

    Raises:
        ValueError: the module cannot be imported, has no such name, or it is something else.
    """
    try:
        return _as_algorithm(named_object(reference, "an algorithm"), reference)
    except TypeError as error:  # a guide of another form
        raise ValueError(f"{reference}: {error}") from error


@functools.cache
def brought_algorithms(rows: frozenset[str]) -> dict[str, Brought]:
    """The algorithms of installed packages by name, loaded once in a process.

    A broken one is included with its problem, so that an error can name it.

    Args:
        rows: names that the table already has.
    """
    algorithms: dict[str, Brought] = {}
    for entry in metadata.entry_points(group=GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package"
        if entry.name in rows or entry.name in algorithms:
            other = (
                algorithms[entry.name].package
                if entry.name in algorithms
                else "this package's table"
            )
            # Under a name of its own: a package must not replace an algorithm silently.
            name = f"{entry.name} ({package})"
            algorithms[name] = Brought(
                name, package, problem=f"the name {entry.name} is of {other}"
            )
            continue
        try:
            algorithm = _as_algorithm(entry.load(), entry.name)
        # Any error: a broken package must not disable the others.
        except Exception as error:
            problem = f"{type(error).__name__}: {error!s:.200}"
            algorithms[entry.name] = Brought(entry.name, package, problem=problem)
        else:
            algorithms[entry.name] = Brought(entry.name, package, algorithm)
    return algorithms


def own_code(guide: Guide | None, advantages: str, token_advantages: str = NONE) -> dict[str, str]:
    """`{"code": …}` with digests of custom guides and rules, for `run.json`; {} without any."""
    own: dict[str, Any] = {}
    for name, part in _parts_of_guide(guide).items():
        if not type(part).__module__.startswith("sage_unsloth."):
            own[name] = part
    function = advantage_rule(advantages).function
    if function not in RULES.values():
        own["advantages"] = function
    if ":" in token_advantages:
        own["token_advantages"] = token_rule(token_advantages)
    texts = (f"{name} {_digest(written)}" for name, written in own.items())
    return {"code": ", ".join(texts)} if own else {}


def _parts_of_guide(guide: Guide | None, name: str = "guide") -> dict[str, Guide]:
    """A guide, and those within it, by name."""
    parts = {} if guide is None else {name: guide}
    for key, value in getattr(guide, "__dict__", {}).items():
        if isinstance(value, Guide) and not isinstance(value, type):
            parts |= _parts_of_guide(value, f"{name}.{key}")
    return parts


def _digest(written: Any) -> str:
    try:
        return source_digest(written)
    # Typed into an interpreter, there is no source to digest.
    except (AttributeError, OSError, TypeError):
        return "unknown"


def _as_algorithm(result: Any, name: str) -> Algorithm:
    if isinstance(result, Algorithm):
        return result
    if isinstance(result, type) or not isinstance(result, Guide):
        raise ValueError(
            f"an algorithm of your own must be an instance of Algorithm or of a guide, but {name} "
            f"is {result!r:.100}. Write {name.rpartition(':')[2]} = Algorithm(name=…, "
            "description=…, guide=…), from sage_unsloth.training"
        )
    own = name.rpartition(":")[2].replace("_", "-").lower()
    return Algorithm(name=own, description=f"grpo with the guide {name}", guide=result)
