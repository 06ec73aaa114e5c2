"""The format of a prompt: which tags can be, what SFT teaches, what a template makes of it."""

from dataclasses import asdict
from json import dumps, loads

import pytest

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.prompts import (
    PROJECT_PROMPT,
    TAGS,
    PromptFormat,
    prompt_format,
    recorded_format,
    render_prompt,
    render_solution,
    row_messages,
)

BASE = data_folder() / BASE_MODEL
EOS = "<|endoftext|>"


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["boxed", "1+1=?"], r"got boxed 1\+1=\?. Put other words before --tags"),
        (["<a>"], "tags must be one of project, think-answer, think-boxed, boxed, or two tags"),
        (["<a>", "</a>", "<b>"], "or four around working and answer, got <a> </a> <b>"),
        (["<a>", "<a>"], "tags must differ from each other, got <a> <a>"),
        (["<a>", "</a>", "<b>", "<a>"], "tags must differ"),
        (["<a>", "x<a>"], r"must not be part of another one.*'<a>' and 'x<a>'"),
        (["", "</a>"], "a tag must be one visible word, got ''"),
        ([" ", "</a>"], "a tag must be one visible word, got ' '"),
        (["<a b>", "</a>"], "a tag must be one visible word, got '<a b>'"),
        (["<a>\u200b", "</a>"], "a tag must be one visible word"),
        (["<a>", "</s>"], "a tag must not be a box or an end token, got '</s>'"),
        (["oxed", "</a>"], "must not be part of another one, of a box or of an end token"),
    ],
)
def test_tags_that_cannot_be_told_apart(tags, message):
    with pytest.raises(ValueError, match=message):
        prompt_format(None, tags)


def test_an_empty_system_prompt_is_none_only_by_name():
    with pytest.raises(ValueError, match="a system prompt must not be empty"):
        prompt_format(" ")
    assert prompt_format("none").system is None
    assert prompt_format() is None, "nothing was asked for"


def test_the_system_prompt_asks_for_the_tags_that_are_given():
    assert prompt_format(None, ["project"]) == PROJECT_PROMPT
    assert prompt_format(None, ["think-answer"]).system == (
        "You are given a problem.\nThink about the problem and provide your working out.\n"
        "Place it between <think> and </think>.\n"
        "Then, provide your solution between <answer></answer>"
    )
    assert prompt_format(None, ["boxed"]).system.endswith("provide your solution in \\boxed{}")
    assert prompt_format("Add.", ["<a>", "</a>"]).missing_marks == ("<a>", "</a>")
    assert prompt_format("Put it in \\boxed{}.", ["boxed"]).missing_marks == ()


@pytest.mark.parametrize(
    ("tags", "working", "taught"),
    [
        (
            ["project"],
            "w",
            "<start_working_out>w<end_working_out><SOLUTION>7</SOLUTION>",
        ),
        (["think-answer"], "w", "<think>w</think><answer>7</answer>"),
        (["<a>", "</a>"], "w", "w<a>7</a>"),
        (["think-boxed"], r"so \boxed{7}.", r"<think>so \boxed{7}.</think>\boxed{7}"),
        (["boxed"], "w", "w\n\\boxed{7}"),
        (["boxed"], r"so it is $\boxed{7}$.", r"so it is $\boxed{7}$."),
        (["boxed"], r"first \boxed{6}, so \boxed{7}", "first {6}, so {7}\n\\boxed{7}"),
        (["boxed"], r"\boxed{7} is right", "{7} is right\n\\boxed{7}"),
    ],
)
def test_what_sft_teaches(tags, working, taught):
    prompt = prompt_format(None, tags)
    assert prompt.taught({"solution": working, "answer": "7"}) == taught
    assert prompt.taught({"solution": working}) == working, "without an answer as it is"


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("system", [None, "none", "Answer in <answer> or \\boxed{}."])
def test_a_format_is_recorded_and_asked_for_again_by_its_options(name, system):
    prompt = prompt_format(system, [name])
    assert recorded_format({"prompt": loads(dumps(asdict(prompt)))}) == prompt
    words = prompt.options()
    asked = dict.fromkeys(("--tags", "--system-prompt"))
    for word in words:
        if word in asked:
            last, asked[word] = word, []
        else:
            asked[last].append(word)
    system = asked["--system-prompt"] and asked["--system-prompt"][0]
    assert (prompt_format(system, asked["--tags"]) or PROJECT_PROMPT) == prompt


def test_a_record_without_a_format_had_the_projects():
    assert recorded_format({"template": "model"}) == PROJECT_PROMPT


ODD = "Say \"x\" and 'y'; {{ 7*7 }} {% if a %} \\boxed{} \\n\nnext line \u00e9 \U0001f600"


def test_any_text_is_a_system_prompt_as_it_stands():
    prompt = PromptFormat(system=ODD, reasoning=("<'w'>", "</w>"), solution=("{{a}}", "{%b%}"))
    tokenizer = load_tokenizer(BASE, prompt=prompt)
    assert render_prompt(tokenizer, "1+1=?") == f"{ODD}{EOS}1+1=?<'w'>"
    whole = render_solution(tokenizer, "1+1=?", prompt.solution_text("1+1=2", "2"))
    assert whole == f"{ODD}{EOS}1+1=?<'w'>1+1=2</w>{{{{a}}}}2{{%b%}}{EOS}"


def test_without_a_system_prompt_or_tags_the_prompt_is_the_problem():
    tokenizer = load_tokenizer(BASE, prompt=prompt_format("none", ["boxed"]))
    assert render_prompt(tokenizer, "1+1=?") == "1+1=?"


def test_a_conversation_is_asked_as_it_is():
    tokenizer = load_tokenizer(BASE)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2+2=?"},
    ]
    row = {"problem": "and 2+2=?", "messages": turns}
    asked = f"Be brief.{EOS}1+1=?2{EOS}and 2+2=?<start_working_out>"
    assert render_prompt(tokenizer, row_messages(row)) == asked
    assert render_prompt(tokenizer, row_messages({"messages": turns[1:]})).startswith(
        "You are given"
    )


def test_a_special_token_is_no_tag():
    # The tiny model's only ones are end tokens, which no format takes; so by hand.
    prompt = PromptFormat(solution=("<a>", "</a>"))
    object.__setattr__(prompt, "solution", ("<|pad|>", "</a>"))
    with pytest.raises(ValueError, match="a tag must not be a special token"):
        load_tokenizer(BASE, prompt=prompt)
