"""How the models of an evaluation were trained: their verifier, and how completions were drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.grading.checkers import REASONING_GYM
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.runs.record import read_record


def _rl_settings(model: ModelSpec) -> dict[str, Any]:
    """Settings of the RL run that left this model; {} where no run is known."""
    record = read_record(Path(model.adapter or model.path).absolute().parent)
    settings = {} if record is None else record["settings"]
    return settings if settings.get("stage") == "rlvr" else {}


def trained_sampling(models: Sequence[ModelSpec]) -> dict[str, float]:
    """`temperature`, `top_p` and `min_p` as in the RL runs that left these models, as far as they
    agree. A temperature of 1, training's usual one, is left out: the paper evaluates at another.
    """
    runs = [settings for model in models if (settings := _rl_settings(model))]
    values = {name: {run.get(name) for run in runs} for name in ("temperature", "top_p", "min_p")}
    same = {name: drawn.pop() for name, drawn in values.items() if len(drawn) == 1}
    return {
        name: value
        for name, value in same.items()
        if value is not None and (name, value) != ("temperature", 1.0)
    }


def trained_verifier(model: ModelSpec) -> str | None:
    """The name of the verifier of the RL run that left this model; None where no run is known."""
    if not (settings := _rl_settings(model)):
        return None
    label = settings.get("verifier", MATH.label)
    name = label.partition(",")[0].rpartition(" ")[0]  # without version and packages
    return None if name == REASONING_GYM.name else name


def choose_verifier(
    models: Sequence[ModelSpec], given: str | None, *, other: bool = False
) -> str | None:
    """The verifier of custom problems: the given one, or that of the runs; None if neither is
    known.

    Args:
        other: the user confirms that it differs from training.

    Raises:
        ValueError: another verifier than a run's, or runs with different ones.
    """
    trained = {model.name: trained_verifier(model) for model in models}
    trained = {name: verifier for name, verifier in trained.items() if verifier is not None}
    if given is None:
        if len({*trained.values()}) > 1:
            raise ValueError(
                f"the models were trained by different verifiers: {trained}. Say which one grades "
                "(--verifier NAME --other-verifier)"
            )
        return next(iter(trained.values()), None)
    for name, verifier in trained.items():
        if verifier != given and not other:
            raise ValueError(
                f"{name} was trained by the verifier {verifier}, got --verifier {given}. Leave it "
                "out, or add --other-verifier"
            )
    return given
