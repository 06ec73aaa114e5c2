"""Stage 1 on the shipped base model: what is learned, what is left on disk, and that a killed run
resumes.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken

from sage_unsloth import front
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.problems import arithmetic
from sage_unsloth.prompts import PROJECT_PROMPT, taught_tokens
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.sampling.record_sets import prompt_ids
from sage_unsloth.training.sft_stage import SftConfig, _trainer, sft
from sage_unsloth.training.stage import read_metrics

BASE = data_folder() / BASE_MODEL
CONFIG = replace(smoke_config().sft, max_steps=4, save_steps=2)
ROWS = arithmetic.problems("sft")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, unsloth_module):
    folder = tmp_path_factory.mktemp("sft")
    sft(CONFIG, BASE, ROWS, folder)
    return folder


def test_leaves_an_adapter_and_a_merged_model_that_differs_from_the_base(whole_run):
    before, _ = load_policy(BASE)
    after, tokenizer = load_policy(whole_run / "model")
    changed = [
        n for n, p in after.state_dict().items() if not torch.equal(p, before.state_dict()[n])
    ]
    assert any("q_proj" in name for name in changed)
    assert not any("lora" in name for name in after.state_dict())
    assert [row["step"] for row in read_metrics(whole_run)] == [1, 2, 3, 4]
    assert not (whole_run / "checkpoints").exists()
    with_adapter, _ = load_policy(BASE, adapter=whole_run / "adapter")
    ids = torch.tensor([tokenizer("17*6=?")["input_ids"]])
    with torch.no_grad():
        merged, apart = after(input_ids=ids).logits, with_adapter(input_ids=ids).logits
    torch.testing.assert_close(merged, apart, rtol=0, atol=1e-4)


class Stop(Exception):
    """Raised by a test in place of training."""


def first_batch(monkeypatch, config, rows, folder):
    """The collated batch that training would begin with."""
    from sage_unsloth.training import sft_stage as module

    seen = {}

    def stop(trainer, *args, **kwargs):
        seen["batch"] = trainer.data_collator([trainer.train_dataset[0]])
        raise Stop

    monkeypatch.setattr(module, "run_trainer", stop)
    with pytest.raises(Stop):
        sft(config, BASE, rows, folder)
    return seen["batch"]["input_ids"][0], seen["batch"]["labels"][0]


def test_learns_the_completion_only_and_its_eos(unsloth_module, tmp_path, monkeypatch):
    ids, labels = first_batch(monkeypatch, CONFIG, ROWS[:4], tmp_path)
    tokenizer = load_tokenizer(BASE)
    row = ROWS[0]
    answer = f"<SOLUTION>{row['answer']}</SOLUTION>{tokenizer.eos_token}"
    expected = f"{row['solution']}<end_working_out>{answer}"
    assert tokenizer.decode(ids[labels != -100]) == expected
    shown = tokenizer.decode(ids[labels == -100])
    assert shown.startswith("You are given a problem.") and shown.endswith("<start_working_out>")


def test_the_prompt_has_the_tokens_that_are_sampled_from():
    """A token that joins the end of the prompt with the first word, as Qwen's `>The`."""
    tokenizer, row = load_tokenizer(BASE), ROWS[0]
    before = taught_tokens(tokenizer, row, PROJECT_PROMPT)
    joined = f"<start_working_out>{row['solution'][:2]}"
    tokenizer.add_tokens(AddedToken(joined, normalized=False))
    whole = tokenizer(tokenizer.decode(before["input_ids"]), add_special_tokens=False)
    assert whole["input_ids"] != before["input_ids"], "the texts are joined"
    assert taught_tokens(tokenizer, row, PROJECT_PROMPT) == before
    ids = before["input_ids"][: before["completion_mask"].index(1)]
    assert ids == prompt_ids(tokenizer, row["problem"])


@pytest.mark.parametrize("trained", [True, False])
def test_a_finished_run_is_merged_with_its_own_adapter(trained, unsloth_module, tmp_path):
    """Killed before the merge: the trainer of the second call has a fresh adapter."""
    config = replace(CONFIG, max_steps=1)
    model, tokenizer = load_policy(BASE, lora=LoraSettings(rank=4))
    if trained:
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.fill_(0.05)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    fresh, _ = load_policy(BASE, lora=LoraSettings(rank=4))
    trainer = _trainer(config, fresh, tokenizer, ROWS[:4], tmp_path)
    front.train(trainer, tmp_path, name="SFT", merge_with=tokenizer)
    merged, weights = (load_file(f"{p}/model.safetensors") for p in (tmp_path / "model", BASE))
    assert any(not torch.equal(merged[n].float(), weights[n].float()) for n in weights) == trained


def test_learns_the_whole_sequence_where_asked(unsloth_module, tmp_path, monkeypatch):
    config = replace(CONFIG, completion_only_loss=False)
    ids, labels = first_batch(monkeypatch, config, ROWS[:4], tmp_path)
    assert torch.equal(ids, labels)
    assert load_tokenizer(BASE).decode(labels).startswith("You are given a problem.")


def test_killed_while_merging_only_merges(whole_run, tmp_path, monkeypatch):
    from sage_unsloth.training import sft_stage as module

    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    shutil.rmtree(folder / "model")
    monkeypatch.setattr(
        module, "run_trainer", lambda *a, **k: pytest.fail("nothing is to be trained")
    )
    sft(CONFIG, BASE, ROWS, folder)
    found = load_file(folder / "model" / "model.safetensors")
    expected = load_file(whole_run / "model" / "model.safetensors")
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_complete_folder_returns_at_once_and_another_run_is_refused(whole_run, monkeypatch):
    from sage_unsloth.training import sft_stage as module

    monkeypatch.setattr(
        module, "load_policy", lambda *a, **k: pytest.fail("nothing is to be loaded")
    )
    assert sft(CONFIG, BASE, ROWS, whole_run) == whole_run / "model"
    with pytest.raises(ValueError, match=r"learning_rate was 0.0005 and is 1.0"):
        sft(replace(CONFIG, learning_rate=1.0), BASE, ROWS, whole_run)
    with pytest.raises(ValueError, match=r"model was \"arithmetic-base .* and is \"model "):
        sft(CONFIG, whole_run / "model", ROWS, whole_run)


def test_a_row_that_is_cut_before_its_eos_is_refused(unsloth_module, tmp_path):
    rows = [dict(row) for row in ROWS[:4]]
    rows[2]["solution"] *= 6
    with pytest.raises(ValueError, match=r"row 2 ends in .* Raise max_length"):
        sft(CONFIG, BASE, rows, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_steps=0), "max_steps must be >= 1, or -1"),
        (dict(epochs=0), "epochs must be > 0, got 0"),
        (dict(learning_rate=-1.0), "learning_rate must be > 0"),
        (dict(save_steps=0), "save_steps must be > 0"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SftConfig(**changes)


def test_a_result_of_no_step_is_not_called_complete(whole_run, tmp_path):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="a result needs training steps"):
        sft(CONFIG, BASE, ROWS, folder)
