"""Loading: the pad token, adapters that belong, and where a completion ends inside Unsloth's
loss.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from sage_unsloth.models.embedded import BASE_MODEL, SMALL, data_folder, is_small
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.models.tokenizers import PAD_TOKEN, load_tokenizer
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.training.rlvr_stage import rlvr

BASE = data_folder() / BASE_MODEL
RLVR = replace(smoke_config().rlvr, max_steps=1, learning_rate=5e-3)


@pytest.fixture
def copy_of_base(tmp_path):
    """A function that copies the base model with other special tokens."""

    def copy(name, *, pad="own", extra=(), stops=None):
        from transformers import AutoTokenizer

        folder = tmp_path / name
        shutil.copytree(BASE, folder)
        tokenizer = AutoTokenizer.from_pretrained(BASE)
        if extra:
            tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
        if pad != "own":
            tokenizer.pad_token = {"eos": tokenizer.eos_token, "none": None}[pad]
        tokenizer.save_pretrained(folder)
        if extra:
            enlarge(folder, len(tokenizer))
        if stops is not None:
            settings = {"eos_token_id": stops}
            (folder / "generation_config.json").write_text(json.dumps(settings))
        return folder

    return copy


def enlarge(folder, rows):
    """Give the model's embedding that many rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(rows)
    model.save_pretrained(folder)


@pytest.mark.smoke
def test_a_pad_token_of_its_own_is_kept():
    assert load_tokenizer(BASE).pad_token == "<|pad|>"


def test_one_thread_is_for_small_models_alone(tmp_path):
    assert is_small(BASE) and not is_small("org/model")
    for half in ("a", "b"):
        with (tmp_path / f"{half}.safetensors").open("wb") as file:
            file.truncate(SMALL // 2)
    assert is_small(tmp_path)
    (tmp_path / "c.safetensors").write_bytes(b"1")
    assert not is_small(tmp_path)


@pytest.mark.parametrize("pad", ["eos", "none"])
def test_pad_that_is_eos_gives_way_to_a_token_made_for_padding(copy_of_base, pad, caplog):
    folder = copy_of_base(f"with-reserved-{pad}", pad=pad, extra=("<|im_end|>", "<|vision_pad|>"))
    caplog.set_level("INFO")
    tokenizer = load_tokenizer(folder)
    # The base model's own token is still there, comes first, and is found again by its name.
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert "Pad token of" in caplog.text


def test_pad_that_generation_stops_at_gives_way(copy_of_base):
    """Qwen2.5-Instruct: EOS is <|im_end|>, pad is <|endoftext|>, and generation stops at either."""
    own = load_tokenizer(BASE)
    folder = copy_of_base(
        "stops", extra=("<|vision_pad|>",), stops=[own.eos_token_id, own.pad_token_id]
    )
    assert load_tokenizer(folder).pad_token == "<|vision_pad|>"


def tiny_tokenizer(folder, rows):
    """A tokenizer without any reserved token, and the config of a model with that many rows."""
    from conftest import build_tokenizer
    from transformers import Qwen2Config

    tokenizer = build_tokenizer(pad_token="<eos>")
    tokenizer.save_pretrained(folder)
    Qwen2Config(vocab_size=rows).save_pretrained(folder)
    return len(tokenizer)


def test_a_spare_row_of_the_embedding_can_be_the_pad_token(tmp_path):
    tiny_tokenizer(tmp_path, 64)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token == PAD_TOKEN
    assert len(tokenizer) - 1 == tokenizer.pad_token_id < 64


def test_no_token_to_pad_with_is_refused(tmp_path):
    used = tiny_tokenizer(tmp_path, 64)
    tiny_tokenizer(tmp_path, used)
    with pytest.raises(ValueError, match=r"other than EOS, .* Enlarge the embedding"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    from conftest import build_tokenizer
    from transformers import Qwen2Config

    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must have an EOS token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_the_completion_mask_ends_at_the_end_of_each_completion(
    unsloth_module, copy_of_base, tmp_path, monkeypatch, pad
):
    """The mask inside Unsloth's loss has one place for each sampled token, the EOS of a finished
    completion included.
    """
    from sage_unsloth.grading.reward import SolutionReward

    masks, ids = [], []
    log_guide, reward = BranchGuide.log_guide, SolutionReward.__call__

    def see_mask(self, signals, **kwargs):
        masks.append(signals.mask.clone())
        return log_guide(self, signals, **kwargs)

    def see_ids(self, *args, completion_ids=None, **kwargs):
        ids.extend(completion_ids)
        return reward(self, *args, **kwargs)

    monkeypatch.setattr(BranchGuide, "log_guide", see_mask)
    monkeypatch.setattr(SolutionReward, "__call__", see_ids)
    model = copy_of_base(f"pad-{pad}", pad=pad)
    config = replace(RLVR, max_completion_length=40)
    rlvr(config, model, arithmetic.problems("train"), tmp_path / "run", BranchGuide())
    eos = load_tokenizer(model).eos_token_id
    finished = [completion[-1] == eos for completion in ids]
    assert any(finished), "the model must end some completion, or nothing is tested"
    assert all(eos not in completion[:-1] for completion in ids)
    sums = torch.cat([mask.sum(-1) for mask in masks]).tolist()
    assert sorted(sums) == sorted(len(completion) for completion in ids)


@pytest.fixture(scope="module")
def adapter(unsloth_module, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    model, _ = load_policy(BASE, lora=LoraSettings())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def test_training_goes_on_from_an_adapter_as_it_was(adapter):
    tokenizer = load_tokenizer(BASE)
    trained, given = load_policy(BASE, adapter=adapter, tokenizer=tokenizer)
    assert given is tokenizer, "what is loaded already is not loaded again"
    again, _ = load_policy(BASE, lora=LoraSettings(), adapter=adapter)
    ids = torch.tensor([tokenizer("17*6=?")["input_ids"]])
    with torch.no_grad():
        expected, found = trained(input_ids=ids).logits, again(input_ids=ids).logits
    assert torch.equal(expected, found)
    assert all(p.requires_grad for n, p in again.named_parameters() if "lora" in n)
    assert list(again.peft_config) == ["default"]


def test_adapters_that_do_not_belong_are_refused(adapter, tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config.json, but .* has none"):
        load_policy(BASE, adapter=tmp_path)
    with pytest.raises(ValueError, match="its own settings"):
        load_policy(BASE, adapter=adapter, lora=LoraSettings(rank=4))


def test_bad_loading_is_refused():
    with pytest.raises(ValueError, match="full_finetuning does not go with"):
        load_policy(BASE, lora=LoraSettings(), full_finetuning=True)
    with pytest.raises(
        ValueError, match=r"'no/such-model' could not be loaded: .*[^.]\. Check the"
    ):
        load_policy("no/such-model")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use_vllm needs a GPU"):
            load_policy(BASE, use_vllm=True)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (dict(rank=0), "rank must be >= 1, got 0"),
        (dict(alpha=0), "alpha must be > 0, got 0"),
        (dict(dropout=1.0), r"dropout must be below 1, got targets=.* dropout=1.0"),
        (dict(dropout=-0.1), "dropout must be in"),
        (dict(targets=()), r"targets must not be empty .*, got targets=\(\)"),
    ],
)
def test_lora_settings_are_checked(field, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings(**field)
