"""The verifier that the evaluated models were trained with, for custom problems."""

from collections.abc import Sequence
from pathlib import Path

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.grading.checkers import REASONING_GYM
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.runs.files import read_json


def trained_verifier(model: ModelSpec) -> str | None:
    """The name of the verifier of the RL run that made this model; None without a run."""
    record = Path(model.adapter or model.path).absolute().parent / "run.json"
    settings = read_json(record)["settings"] if record.is_file() else {}
    if settings.get("stage") != "rlvr":
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
