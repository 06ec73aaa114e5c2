"""Every private name of Unsloth and TRL stands in one place."""

import ast
from pathlib import Path

from sage_unsloth.trainers import trainer_names

PACKAGE = Path(trainer_names.__file__).parents[1]
FILES = [
    file
    for room in ("patch", "trainers", "methods")
    for file in (PACKAGE / room).glob("*.py")
    if file != Path(trainer_names.__file__)
]


def private_names():
    """The strings of the module that are names of others; public ones where they are long enough
    to be nobody else's.
    """
    values = [v for n, v in vars(trainer_names).items() if n.isupper() and isinstance(v, str)]
    return {v for v in values if v.isidentifier() and (v.startswith("_") or "_" in v[3:])}


def test_they_are_written_once():
    names = private_names()
    assert {"_calculate_rewards", "_compute_loss", "grpo_high_entropy_mask"} <= names
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not texts & (names - {"top_entropy_quantile"}), file.name


def test_no_private_attribute_of_a_trainer_is_read_under_its_name():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = ast.unparse(node.value)
                assert not owner.endswith("trainer"), f"{file.name}: {owner}.{node.attr}"
