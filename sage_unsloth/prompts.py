"""The tags, the system prompt and the chat template, for training, evaluation and grading alike.

So the prompt that a model is evaluated on is, byte for byte, the one that it was trained on.
Wording and template follow the paper's two stages. The system prompt names the tags; the template
around it is the project's or the model's own (`TEMPLATES`, `models.templates`).
"""

import json
from typing import Any

REASONING_START = "<start_working_out>"
REASONING_END = "<end_working_out>"
SOLUTION_START = "<SOLUTION>"
SOLUTION_END = "</SOLUTION>"

SYSTEM_PROMPT = (
    "You are given a problem.\n"
    "Think about the problem and provide your working out.\n"
    f"Place it between {REASONING_START} and {REASONING_END}.\n"
    f"Then, provide your solution between {SOLUTION_START}{SOLUTION_END}"
)

TEMPLATES = ("project", "model")
"""Whose chat template makes the prompts: the project's `CHAT_TEMPLATE`, or the model's own."""

# Before any template: a conversation without a system turn gets the project's, so that a saved
# model answers in plain transformers as it was trained to.
DEFAULT_SYSTEM = (
    "{% if not messages or messages[0]['role'] != 'system' %}"
    "{% set messages = [{'role': 'system', 'content': "
    + json.dumps(SYSTEM_PROMPT)
    + "}] + messages %}{% endif %}"
)

TURNS = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ message['content'] }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + REASONING_START + "' }}{% endif %}"
)
"""The project's turns: each ends in EOS but the user's, and an answer begins in its opened tag."""

CHAT_TEMPLATE = DEFAULT_SYSTEM + TURNS


def prompt_messages(problem: str) -> list[dict[str, str]]:
    """The conversation that asks `problem`: the system prompt, then the user's turn."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}]


def solution_text(working: str, answer: str) -> str:
    """The assistant's turn as SFT teaches it; the chat template adds the EOS token behind it."""
    return f"{REASONING_START}{working}{REASONING_END}{SOLUTION_START}{answer}{SOLUTION_END}"


def render_solution(tokenizer: Any, problem: str, working: str, answer: str) -> str:
    """The text that SFT trains on: the conversation that asks `problem`, and its solution."""
    solution = {"role": "assistant", "content": solution_text(working, answer)}
    return tokenizer.apply_chat_template([*prompt_messages(problem), solution], tokenize=False)


def render_prompt(tokenizer: Any, problem: str) -> str:
    """The text that generation continues, by the tokenizer's chat template.

    The project's template ends in the opened working-out tag.

    Args:
        tokenizer: with its template chosen (`models.tokenizers.prepare_tokenizer`).
        problem: the user's turn.

    Raises:
        ValueError: the tokenizer has no EOS token, which the template puts after the system
            prompt.
    """
    if tokenizer.eos_token is None:
        raise ValueError(
            "the tokenizer must have an EOS token because the chat template ends each turn with "
            "it; got None; set tokenizer.eos_token"
        )
    return tokenizer.apply_chat_template(
        prompt_messages(problem), add_generation_prompt=True, tokenize=False
    )
