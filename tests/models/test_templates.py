"""Whose chat template makes the prompts: which one a model gets, and that its chain keeps it."""

import json
import shutil
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.templates import choose_template, put_template, recorded_template
from sage_unsloth.models.tokenizers import load_tokenizer, open_tokenizer
from sage_unsloth.problems import arithmetic
from sage_unsloth.prompts import (
    PROJECT_PROMPT,
    SYSTEM_PROMPT,
    prompt_format,
    prompt_messages,
    render_prompt,
    system_part,
)
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.sampling.record_sets import prompt_ids
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft

BASE = data_folder() / BASE_MODEL
EOS = "<|endoftext|>"
SMOKE = smoke_config()
TURNS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}END{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
INSTRUCT = TURNS.replace("END", "{{ eos_token }}\n")  # as ChatML: a newline behind the end
BASE_WITH_ONE = TURNS.replace("END", "|im_end|")  # ends a turn where the model does not stop
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
DROPS_SYSTEM = INSTRUCT.replace("in messages", "in messages if m['role'] != 'system'")
OPENS_THOUGHT = INSTRUCT.replace("[assistant]{% endif", "[assistant]<think>{% endif")


@pytest.fixture
def model(tmp_path):
    """A function that copies the tiny model with another chat template, or with none."""

    def copy(template, name="model"):
        folder = tmp_path / name
        shutil.copytree(BASE, folder)
        (folder / "chat_template.jinja").unlink()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return copy


@pytest.mark.smoke
def test_a_conversation_without_a_system_turn_gets_the_projects_in_plain_transformers():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    question = {"role": "user", "content": "12*6=?"}

    def render(*messages):
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )

    asked = f"{SYSTEM_PROMPT}{EOS}12*6=?<start_working_out>"
    assert render(question) == asked
    assert render({"role": "system", "content": SYSTEM_PROMPT}, question) == asked
    mine = render({"role": "system", "content": "Be brief."}, question)
    assert mine == f"Be brief.{EOS}12*6=?<start_working_out>"


@pytest.mark.parametrize(
    ("template", "wanted", "chosen", "reason"),
    [
        (None, None, "project", "has none of its own"),
        (INSTRUCT, None, "model", "is an instruct model"),
        (INSTRUCT, "project", "project", "as requested"),
        (INSTRUCT, "model", "model", "as requested"),
        (BASE_WITH_ONE, None, "project", "so it is a base model"),
        (BASE_WITH_ONE, "model", "model", "as requested"),
        (NO_SYSTEM, None, "project", "takes no system turn"),
        (DROPS_SYSTEM, None, "project", "takes no system turn"),
    ],
)
def test_the_template_of_a_model_that_was_not_trained_here(model, template, wanted, chosen, reason):
    choice = open_tokenizer(model(template), wanted)[1]
    assert choice.template == chosen and reason in choice.reason


@pytest.mark.parametrize(
    ("template", "wanted", "message"),
    [
        (None, "model", r"has none. Use template 'project'"),
        (NO_SYSTEM, "model", "must take a system turn"),
        (DROPS_SYSTEM, "model", "must take a system turn"),
        (INSTRUCT, "own", "template must be one of project, model, got 'own'"),
    ],
)
def test_a_template_that_cannot_be_had(model, template, wanted, message):
    with pytest.raises(ValueError, match=message):
        open_tokenizer(model(template), wanted)


def test_a_model_that_carries_the_projects_has_no_other(model):
    folder = model(None)
    load_tokenizer(BASE).save_pretrained(folder)
    for wanted in (None, "model"):
        choice = open_tokenizer(folder, wanted)[1]
        assert choice.template == "project" and "carries it" in choice.reason


def test_the_models_own_template_says_where_the_answer_goes(model, tmp_path):
    tokenizer = load_tokenizer(model(INSTRUCT))
    asked = f"[system]{SYSTEM_PROMPT}{EOS}\n[user]12*6=?{EOS}\n[assistant]"
    assert render_prompt(tokenizer, "12*6=?") == asked
    # As saved, it says so without this package, and is put on once.
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text((BASE / "config.json").read_text())
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    question = [{"role": "user", "content": "12*6=?"}]
    assert saved.apply_chat_template(question, add_generation_prompt=True, tokenize=False) == asked
    assert load_tokenizer(tmp_path / "saved", "model").chat_template == saved.chat_template


@pytest.mark.parametrize("before", [PROJECT_PROMPT, prompt_format("Be brief.")])
def test_a_system_part_is_put_once_and_in_the_place_of_the_projects(model, before):
    path, prompt = model(INSTRUCT), prompt_format("Be brief.")
    tokenizer = AutoTokenizer.from_pretrained(path)
    for each in (before, prompt):
        put_template(tokenizer, "model", path, each)
    assert tokenizer.chat_template == system_part("Be brief.") + INSTRUCT


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"stage": "sft"}, "project"),  # recorded before there was a choice
        ({"stage": "rlvr", "template": "project"}, "project"),
        ({"stage": "rlvr", "template": "model"}, "model"),
        ({"command": "quickstart"}, None),
    ],
)
@pytest.mark.parametrize("export", [False, True])
def test_what_was_trained_here_keeps_its_template(model, tmp_path, settings, template, export):
    folder = model(INSTRUCT)
    record = tmp_path / "run.json"
    record.write_text(json.dumps({"settings": settings}))
    if export:
        record.unlink()
        (folder / "export.json").write_text(json.dumps({"run": settings}))
    assert recorded_template(folder) == template
    assert open_tokenizer(folder)[1].template == (template or "model")
    other = {"project": "model", "model": "project"}
    if template is not None:
        with pytest.raises(ValueError, match=f"the template of its training, '{template}'"):
            open_tokenizer(folder, other[template])


def test_an_adapters_template_comes_before_its_bases(model, tmp_path):
    folder, adapter = model(INSTRUCT), tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"settings": {"stage": "sft"}}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = [tokenizer.eos_token_id]
    assert choose_template(folder, tokenizer, stops).template == "model"
    choice = choose_template(folder, tokenizer, stops, adapter=adapter)
    assert choice.template == "project" and str(adapter) in choice.reason


@pytest.mark.long
def test_a_chain_of_runs_has_one_template(unsloth_module, model, tmp_path):
    start, rows = model(INSTRUCT), arithmetic.problems("sft")
    config = replace(SMOKE.sft, template="model")
    merged = sft(config, start, rows, tmp_path / "sft")
    recorded = json.loads((tmp_path / "sft" / "run.json").read_text())["settings"]
    assert recorded["template"] == "model"
    # Its own turns stand in the merged model, with the system prompt before them.
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.chat_template.endswith(INSTRUCT)
    assert render_prompt(tokenizer, "1+1=?").startswith(f"[system]{SYSTEM_PROMPT}")
    prompts = arithmetic.problems("train")
    with pytest.raises(ValueError, match=r"its training, 'model' for .*, got 'project'"):
        rlvr(SMOKE.rlvr, merged, prompts, tmp_path / "other")
    config = replace(SMOKE.rlvr, template="model", max_prompt_length=80)
    adapter = rlvr(config, merged, prompts, tmp_path / "rl")
    _, tokenizer = load_policy(merged, adapter=adapter)  # takes what was trained
    # As TRL makes the prompt of a row, and as an evaluation does.
    asked = tokenizer.apply_chat_template(
        prompt_messages("1+1=?"), add_generation_prompt=True, return_dict=True
    )
    assert prompt_ids(tokenizer, "1+1=?") == asked["input_ids"]
    assert tokenizer.decode(asked["input_ids"]).startswith(f"[system]{SYSTEM_PROMPT}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (OPENS_THOUGHT, "a solution continues the prompt"),
        (BASE_WITH_ONE, "ends a solution by a token at which the model stops"),
    ],
)
def test_sft_refuses_a_template_that_it_cannot_teach(
    unsloth_module, model, tmp_path, template, message
):
    config = replace(SMOKE.sft, template="model")
    with pytest.raises(ValueError, match=message):
        sft(config, model(template), arithmetic.problems("sft"), tmp_path / "sft")
