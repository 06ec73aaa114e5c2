"""Problems from reasoning-gym's generators; the same seed gives the same items."""

from sage_unsloth.grading.checkers import reasoning_gym_gold
from sage_unsloth.runs.record import package_version

GYM_PREFIX = "reasoning-gym:"
REASONING_GYM_ITEMS, REASONING_GYM_SEED = 100, 3407  # of an evaluation
TRAINING_SEED = 1


def gym_rows(name: str, size: int, seed: int) -> tuple[list[dict], dict]:
    """The items of one generator as rows with `gold` for its own scorer; and provenance.

    Args:
        name: `reasoning-gym:TASK`.

    Raises:
        ValueError: a missing package, an unknown generator, or one without answers.
    """
    task = name.removeprefix(GYM_PREFIX)
    version = package_version("reasoning-gym")
    if version is None:
        raise ValueError(
            f"{name} needs the package reasoning-gym, which is not installed (pip install "
            "reasoning-gym==0.1.25)"
        )
    import reasoning_gym

    try:
        data = reasoning_gym.create_dataset(task, size=size, seed=seed)
    except ValueError as error:
        raise ValueError(
            f"{task!r} must be a generator of reasoning-gym {version}: {error}"
        ) from error
    rows = []
    for index, item in enumerate(data):
        if not item["answer"]:
            raise ValueError(f"{name} has items without an answer, so nothing can be graded")
        rows.append(
            {
                "id": f"{name}/{index}",
                "problem": item["question"],
                "answer": item["answer"],
                "source": f"reasoning-gym {version}",
                "gold": reasoning_gym_gold(task, size, seed, index, item["answer"]),
            }
        )
    provenance = {"package": f"reasoning-gym {version}", "task": task, "seed": seed, "rows": size}
    return rows, provenance


def training_rows(
    name: str, size: int, own_scorer: bool
) -> tuple[list[dict], dict[str, list[bool]], dict]:
    """Items to train on: rows, filters by name (a bool per row), and provenance.

    Args:
        own_scorer: rows have the `gold` of the task's own scorer.
    """
    rows, provenance = gym_rows(name, size, TRAINING_SEED)
    requested = {
        row["problem"] for row in gym_rows(name, REASONING_GYM_ITEMS, REASONING_GYM_SEED)[0]
    }
    new = [row["problem"] not in requested for row in rows]
    columns = ("problem", "answer", *(("gold",) if own_scorer else ()))
    rows = [{column: row[column] for column in columns} for row in rows]
    return rows, {f"not among the {REASONING_GYM_ITEMS} that evaluate asks": new}, provenance
