"""Algorithms that are no rows of the table: `module:name`, and those that installed packages bring.

A package brings algorithms by entry points:

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
    """What an installed package brings under one name.

    Attributes:
        name: for `--algorithm`.
        package: its name and version.
        algorithm: None where it is broken.
        problem: why; empty where it is not.
    """

    name: str
    package: str
    algorithm: Algorithm | None = None
    problem: str = ""


def named_algorithm(reference: str) -> Algorithm:
    """The algorithm `name` of `module`, also of a file in the current folder.

    Args:
        reference: "module:name" of an `Algorithm`, or of a guide: then it is grpo with that guide.

    Raises:
        ValueError: the module cannot be imported, has no such name, or it is something else.
    """
    try:
        return _as_algorithm(named_object(reference, "an algorithm"), reference)
    except TypeError as error:  # a guide of another form
        raise ValueError(f"{reference}: {error}") from error


@functools.cache
def brought_algorithms(rows: frozenset[str]) -> dict[str, Brought]:
    """What the installed packages bring, by name; loaded once in a process.

    A broken one is kept with its problem, so that it can be named.

    Args:
        rows: the names that the table has already.
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
            name = f"{entry.name} ({package})"
            algorithms[name] = Brought(
                name, package, problem=f"the name {entry.name} is of {other}"
            )
            continue
        try:
            algorithm = _as_algorithm(entry.load(), entry.name)
        except Exception as error:  # whatever the package raises: the others must stay usable
            problem = f"{type(error).__name__}: {error!s:.200}"
            algorithms[entry.name] = Brought(entry.name, package, problem=problem)
        else:
            algorithms[entry.name] = Brought(entry.name, package, algorithm)
    return algorithms


def own_code(guide: Guide | None, advantages: str, token_advantages: str = NONE) -> dict[str, str]:
    """`{"code": …}`, digests of the files that a guide or a rule of your own is written in, for
    `run.json`; empty where all is this package's.
    """
    own: dict[str, Any] = {}
    if guide is not None and not type(guide).__module__.startswith("sage_unsloth."):
        own["guide"] = guide
    function = advantage_rule(advantages).function
    if function not in RULES.values():
        own["advantages"] = function
    if ":" in token_advantages:
        own["token_advantages"] = token_rule(token_advantages)
    texts = (f"{name} {_digest(written)}" for name, written in own.items())
    return {"code": ", ".join(texts)} if own else {}


def _digest(written: Any) -> str:
    try:
        return source_digest(written)
    except (AttributeError, OSError, TypeError):  # typed into an interpreter: there is no source
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
