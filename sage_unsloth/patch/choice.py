"""The arguments of one `guided_kl`, and the methods around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from sage_unsloth.objective.advantages import ShapeAdvantages
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import SHAPES, listening
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.trainer_names import ContractError

METHODS_ATTRIBUTE, OPEN_ATTRIBUTE = "_sage_unsloth_methods", "_sage_unsloth_open"
"""Our attributes of the trainer: the open methods, and whether `guided_kl` is open."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method, as a context outside `guided_kl` requests it.

    Attributes:
        name: unique on the trainer, and the key in a checkpoint.
        record: must be equal to resume.
        check: (trainer, choice) raises if they do not fit together; called by `guided_kl`.
        shape: changes the advantages of each micro-batch, in the order of `listening.SHAPES`.
        needs: further signals of the batch, such as "groups".
        needs_hook: the loss must call the hook even without a guide.
    """

    name: str
    record: str
    check: Callable[[Any, "Choice"], None]
    shape: ShapeAdvantages | None = None
    needs: frozenset[str] = frozenset()
    needs_hook: bool = True


@contextmanager
def add_method(trainer: Any, method: Method) -> Iterator[None]:
    """Within this context, the next `guided_kl` of the trainer uses the method.

    Raises:
        ContractError: `guided_kl` is already open, already has the method, or is not open when
            training begins.
    """
    methods: tuple[Method, ...] = vars(trainer).get(METHODS_ATTRIBUTE, ())
    if is_open(trainer) or method.name in [other.name for other in methods]:
        raise ContractError(
            f"what sets {method.name} must be opened once, before guided_kl",
            actual="an open guided_kl" if is_open(trainer) else f"another {method.name}",
            expected="with METHOD(trainer), guided_kl(trainer, guide): …",
        )

    def step(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_open(trainer):
            raise ContractError(
                f"what sets {method.name} must be followed by guided_kl, which checks and records "
                "it",
                actual="a training step without it",
                expected="with METHOD(trainer), guided_kl(trainer): …",
            )
        return proceed(*args, **kwargs)

    # The first method listens for all: one listener is enough to see a step without guided_kl.
    guard = nullcontext() if methods else listening(trainer, "methods", **{names.STEP: step})
    with replace_attributes(trainer, **{METHODS_ATTRIBUTE: (*methods, method)}), guard:
        yield


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The arguments of `guided_kl` by name, and the methods opened around it.

    Checked against the trainer (`settings.check_choice`), recorded in each checkpoint and
    compared on resume (`trained_with.resume_record`).
    """

    guide: Guide | None
    teacher: Any
    shape: ShapeAdvantages | None
    log_entropy: bool
    methods: tuple[Method, ...]

    @property
    def needs(self) -> set[str]:
        """Optional signals of the guide and the methods."""
        of_guide = set() if self.guide is None else set(self.guide.needs)
        return of_guide.union(*(method.needs for method in self.methods))

    @property
    def needs_entropies(self) -> bool:
        return self.log_entropy or "entropies" in self.needs

    @property
    def needs_hook(self) -> bool:
        """Whether anything in the trainer's loss must be replaced."""
        given = self.guide is not None or self.shape is not None or self.log_entropy
        return given or any(method.needs_hook for method in self.methods)

    @property
    def shapes(self) -> list[ShapeAdvantages]:
        """Functions that change the advantages of a micro-batch, in order."""
        # SHAPES fixes the order, so that the order in which the contexts were opened cannot change
        # a loss.
        by_name = {"shape": self.shape} | {m.name: m.shape for m in self.methods}
        return [shape for name in SHAPES if (shape := by_name.get(name)) is not None]

    def recorded(self, name: str, default: str) -> str:
        """The record of the method of that name."""
        return next((m.record for m in self.methods if m.name == name), default)


def is_open(trainer: Any) -> bool:
    return OPEN_ATTRIBUTE in vars(trainer)


def added_methods(trainer: Any) -> tuple[Method, ...]:
    return vars(trainer).get(METHODS_ATTRIBUTE, ())
