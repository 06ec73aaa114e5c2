"""A run that is resumed behind its first pass takes the rows in the order of one that was not."""

import pytest
from ordering import SETTINGS, check_order_is_kept, taken

from sage_unsloth.trainers.data_order import keep_row_order
from sage_unsloth.trainers.trainer_names import ContractError

pytestmark = pytest.mark.usefixtures("unsloth_module")


@pytest.mark.long
@pytest.mark.parametrize("after", [1, 3, 4, 6, 7])
def test_a_resumed_run_keeps_the_order(make_trainer, after):
    check_order_is_kept(make_trainer, after)


def test_with_accumulated_micro_batches_too(make_trainer):
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    check_order_is_kept(make_trainer, 4, **parts)


def test_without_a_resume_the_order_is_trls_own(make_trainer, monkeypatch):
    settings = SETTINGS | {"max_steps": 7}
    kept = taken(make_trainer(**settings))
    monkeypatch.setattr("sage_unsloth.patch.guided.keep_row_order", lambda trainer: order_of_trl())
    assert taken(make_trainer(**settings)) == kept


def order_of_trl():
    from contextlib import nullcontext

    return nullcontext()


def test_rows_that_are_not_shuffled_stay_so(make_trainer):
    seen = taken(make_trainer(**SETTINGS, max_steps=4, shuffle_dataset=False))
    assert [batch[0] for batch in seen] == ["?", "???", "?????", "?"]


def test_another_sampler_is_refused(make_trainer):
    trainer = make_trainer()
    trainer._get_train_sampler = lambda *args: range(3)
    with (
        keep_row_order(trainer),
        pytest.raises(ContractError, match=r"range without shuffle, gener"),
    ):
        trainer._get_train_sampler()
