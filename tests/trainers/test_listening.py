"""Who hears a call of a trainer's method, and in which order."""

import pytest

from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import ORDER, inside, listen
from sage_unsloth.trainers.trainer_names import ContractError


class Trainer:
    def _calculate_rewards(self, value):
        return [*value, "trainer"]


def heard(role):
    return lambda proceed, value: proceed([*value, role])


@pytest.mark.parametrize("opened", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_is_the_tables_in_whichever_order_contexts_open(opened):
    trainer, roles = Trainer(), ORDER[names.REWARDS]
    first, second, third = (roles[i] for i in opened)
    with listen(trainer, first, **{names.REWARDS: heard(first)}):
        with (
            listen(trainer, second, **{names.REWARDS: heard(second)}),
            listen(trainer, third, **{names.REWARDS: heard(third)}),
        ):
            assert trainer._calculate_rewards([]) == [*roles, "trainer"]
            after = [roles[2], "trainer"]
            assert inside(trainer, names.REWARDS, roles[1])([]) == after
        assert trainer._calculate_rewards([]) == [first, "trainer"]
    assert vars(trainer) == {}


def test_another_trainer_hears_nothing_and_what_stood_on_the_instance_comes_back():
    trainer, other = Trainer(), Trainer()
    own = trainer._calculate_rewards = lambda value: [*value, "own"]
    with listen(trainer, "finite", **{names.REWARDS: heard("finite")}):
        assert trainer._calculate_rewards([]) == ["finite", "own"]
        assert other._calculate_rewards([]) == ["trainer"]
    assert trainer._calculate_rewards is own


def test_a_role_is_taken_once():
    trainer = Trainer()
    with (
        listen(trainer, "finite", **{names.REWARDS: heard("finite")}),
        pytest.raises(ContractError, match="'finite' must not be opened twice"),
        listen(trainer, "finite", **{names.REWARDS: heard("finite")}),
    ):
        pass
    assert vars(trainer) == {}
