"""The tags, the system prompt and the chat template for training, evaluation and grading.

So a model is evaluated on byte for byte the prompt that it was trained on. Wording and template
follow the paper's two stages; a `PromptFormat` can change them. The system prompt names the tags;
the template around it is the project's or the model's own (`TEMPLATES`, `models.templates`). Only
the tokenizer's chat template holds the system prompt, and adds it to conversations without one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REASONING_START = "<start_working_out>"
REASONING_END = "<end_working_out>"
SOLUTION_START = "<SOLUTION>"
SOLUTION_END = "</SOLUTION>"
END_TOKENS = (
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>",
    "<|eos|>", "<eos>", "<end_of_turn>", "<|endofturn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<pad>", "<|pad|>",
)  # fmt: skip
"""Tokens that end a turn; written out in a completion, they end the part that is graded."""
BOX = r"\boxed{"
TEMPLATES = ("project", "model")
"""Chat templates: the project's, or the model's own."""
TAGS = {
    "project": (REASONING_START, REASONING_END, SOLUTION_START, SOLUTION_END),
    "think-answer": ("<think>", "</think>", "<answer>", "</answer>"),
    "think-boxed": ("<think>", "</think>"),
    "boxed": (),
}
"""Name -> tags of the reasoning and of the answer; without the latter the answer is in a box."""

TagPair = tuple[str, str]
Turns = Sequence[Mapping[str, str]]


def system_text(reasoning: TagPair | None, solution: TagPair | None) -> str:
    """The system prompt for these tags, in the paper's words."""
    lines = [
        "You are given a problem.",
        "Think about the problem and provide your working out.",
    ]
    if reasoning is not None:
        lines.append(f"Place it between {reasoning[0]} and {reasoning[1]}.")
    place = rf"in {BOX}}}" if solution is None else f"between {solution[0]}{solution[1]}"
    return "\n".join([*lines, f"Then, provide your solution {place}"])


SYSTEM_PROMPT = system_text((REASONING_START, REASONING_END), (SOLUTION_START, SOLUTION_END))


BEHIND_A_BOX = " \n\t$.*)]\\"
"""Characters that may follow a box: the end of a formula or of a sentence, bold, white space."""


def _check_tags(tags: Sequence[str]) -> None:
    """Raises ValueError unless tags differ from each other, from a box and from end tokens."""
    remedy = "Give others, such as <think> </think> <answer> </answer>"
    for tag in tags:
        if not isinstance(tag, str) or tag.split() != [tag] or not tag.isprintable():
            raise ValueError(f"a tag must be one visible word, got {tag!r}. {remedy}")
    if len(set(tags)) < len(tags):
        raise ValueError(f"tags must differ from each other, got {' '.join(tags)}. {remedy}")
    for tag in tags:
        for other in (*tags, BOX, *END_TOKENS):
            if tag != other and (tag in other or other in tag):
                raise ValueError(
                    "a tag must not be part of another one, of a box or of an end token, got "
                    f"{tag!r} and {other!r}. {remedy}"
                )
        if tag in END_TOKENS or tag == BOX:
            raise ValueError(f"a tag must not be a box or an end token, got {tag!r}. {remedy}")


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    r"""The system prompt and the marks of an answer; the defaults are the paper's.

    Attributes:
        system: None for none, so that a model's own template may add its default.
        reasoning: the tags around the reasoning, or None.
        solution: the tags around the answer; None for a `\boxed{}`.
    """

    system: str | None = SYSTEM_PROMPT
    reasoning: TagPair | None = (REASONING_START, REASONING_END)
    solution: TagPair | None = (SOLUTION_START, SOLUTION_END)

    def __post_init__(self) -> None:
        if self.system is not None and not self.system.strip():
            raise ValueError(
                "a system prompt must not be empty. Give 'none' (system=None) to ask without a "
                "system prompt"
            )
        for name, pair in (("reasoning", self.reasoning), ("solution", self.solution)):
            if pair is not None and (isinstance(pair, str) or len(pair) != 2):
                raise ValueError(f"{name} must be an opening and a closing tag, got {pair!r}")
        _check_tags(self.tags)

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags: of the reasoning, then of the answer."""
        return (*(self.reasoning or ()), *(self.solution or ()))

    @property
    def missing_marks(self) -> tuple[str, ...]:
        """The marks of the answer that the system prompt does not mention."""
        marks = self.solution or (r"\boxed",)
        return tuple(mark for mark in marks if mark not in (self.system or ""))

    def solution_text(self, working: str, answer: str) -> str:
        r"""The assistant's turn for SFT; the chat template adds the EOS token.

        If answers are boxed without reasoning tags and the text ends in this box, it is not
        changed; its other boxes lose their `\boxed`.
        """
        if self.reasoning is not None:
            working = f"{self.reasoning[0]}{working}{self.reasoning[1]}"
        if self.solution is not None:
            return f"{working}{self.solution[0]}{answer}{self.solution[1]}"
        box = rf"{BOX}{answer}}}"
        if self.reasoning is not None:
            return working + box
        if working.count(BOX) == 1 and working.rstrip(BEHIND_A_BOX).endswith(box):
            return working
        return f"{working.replace(BOX, '{')}\n{box}"

    def taught(self, row: Mapping[str, str]) -> str:
        """The assistant's turn of an SFT row: its `solution` and `answer` between the tags.

        Without an `answer`, the `solution` as it is.
        """
        if "answer" in row:
            return self.solution_text(row["solution"], row["answer"])
        return row["solution"]

    def options(self) -> list[str]:
        """The command-line options for this format; none for the project's."""
        if self == PROJECT_PROMPT:
            return []
        names = [name for name, tags in TAGS.items() if tags == self.tags]
        words = ["--tags", *(names or self.tags)]
        if self.system != system_text(self.reasoning, self.solution):
            words += ["--system-prompt", "none" if self.system is None else self.system]
        return words


PROJECT_PROMPT = PromptFormat()


def prompt_format(
    system: str | None = None, tags: Sequence[str] | None = None
) -> PromptFormat | None:
    """The format from command-line options; None without any.

    Args:
        system: the system prompt; "none" for none; None for the default of the tags.
        tags: a name of `TAGS`, or the two tags of the answer, or the four of reasoning and answer.

    Raises:
        ValueError: another number of tags or an unknown name; or see `PromptFormat`.
    """
    if system is None and not tags:
        return None
    words = tuple(tags or ("project",))
    if len(words) == 1 and words[0] in TAGS:
        words = TAGS[words[0]]
        reasoning, solution = _pair(words[:2]), _pair(words[2:])
    elif len(words) in (2, 4) and words[0] not in TAGS:
        reasoning, solution = _pair(words[:-2]), _pair(words[-2:])
    else:
        raise ValueError(
            f"tags must be one of {', '.join(TAGS)}, or two tags around the answer, or four around "
            f"working and answer, got {' '.join(words)}"
            + (". Put other words before --tags" if words[0] in TAGS else "")
        )
    text = system_text(reasoning, solution) if system is None else system
    return PromptFormat(
        system=None if system == "none" else text, reasoning=reasoning, solution=solution
    )


def _pair(tags: Sequence[str]) -> TagPair | None:
    return (tags[0], tags[1]) if tags else None


def recorded_format(settings: Mapping[str, Any]) -> PromptFormat:
    """The format in the settings of a run or a record set; older ones had the project's."""
    result = settings.get("prompt")
    if result is None:
        return PROJECT_PROMPT
    pairs = {name: result[name] and tuple(result[name]) for name in ("reasoning", "solution")}
    return PromptFormat(system=result["system"], **pairs)


# --- chat templates -------------------------------------------------------------------------------


def system_part(system: str | None) -> str:
    """The start of any template: adds the system turn to conversations without one.

    So a saved model works in plain transformers as it was trained.
    """
    if system is None:
        return ""
    return (
        "{% if not messages or messages[0]['role'] != 'system' %}"
        "{% set messages = [{'role': 'system', 'content': "
        + json.dumps(system, ensure_ascii=False)
        + "}] + messages %}{% endif %}"
    )


def turns_part(reasoning: TagPair | None) -> str:
    """The project's turns: all but the user's end in EOS, and answers begin in an opened tag."""
    opened = "" if reasoning is None else "{{ " + _jinja(reasoning[0]) + " }}"
    return (
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ message['content'] }}"
        "{% else %}{{ message['content'] + eos_token }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}" + opened + "{% endif %}"
    )


def _jinja(text: str) -> str:
    """A text in single quotes, for a template."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def project_template(prompt: PromptFormat) -> str:
    return system_part(prompt.system) + turns_part(prompt.reasoning)


DEFAULT_SYSTEM = system_part(SYSTEM_PROMPT)
TURNS = turns_part((REASONING_START, REASONING_END))
CHAT_TEMPLATE = project_template(PROJECT_PROMPT)


# --- conversations --------------------------------------------------------------------------------


def prompt_messages(problem: str) -> list[dict[str, str]]:
    """The conversation for `problem`: the system prompt, then the user turn."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}]


def row_messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The conversation for a row: its `messages`, or its `problem` as a user turn.

    The chat template adds the system prompt if there is no system turn.
    """
    messages = row.get("messages")
    if messages is None:
        return [{"role": "user", "content": row["problem"]}]
    return [dict(message) for message in messages]


def solution_text(working: str, answer: str) -> str:
    """`PromptFormat.solution_text` in the project's format."""
    return PROJECT_PROMPT.solution_text(working, answer)


def render_solution(tokenizer: Any, turns: str | Turns, solution: str) -> str:
    """The text for SFT: the conversation, and the assistant turn."""
    answer = {"role": "assistant", "content": solution}
    return tokenizer.apply_chat_template([*_turns(turns), answer], tokenize=False)


def render_prompt(tokenizer: Any, problem: str | Turns) -> str:
    """The text that generation continues, by the tokenizer's chat template.

    The project's template ends in the opened reasoning tag.

    Args:
        tokenizer: of `models.tokenizers.prepare_tokenizer`.
        problem: the user turn, or a whole conversation.

    Raises:
        ValueError: the tokenizer has no EOS token, which follows the system prompt.
    """
    if tokenizer.eos_token is None:
        raise ValueError(
            "the tokenizer must have an EOS token (tokenizer.eos_token), because the chat template "
            "ends each turn with it"
        )
    return tokenizer.apply_chat_template(
        _turns(problem), add_generation_prompt=True, tokenize=False
    )


def _turns(turns: str | Turns) -> list[dict[str, str]]:
    if isinstance(turns, str):
        return row_messages({"problem": turns})
    return [dict(turn) for turn in turns]


def taught_tokens(tokenizer: Any, row: dict, prompt: PromptFormat) -> dict[str, list[int]]:
    """A row as tokens for TRL's SFT trainer: `input_ids`, and `completion_mask` of the solution.

    The prompt has the tokens that RL and evaluation sample from. Tokenizing the whole text may join
    the end of the prompt with the first word (`>The` is one token of Qwen's), which would then be
    masked, or learned after another context.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    turns = row_messages(row)
    asked = render_prompt(tokenizer, turns)
    whole = render_solution(tokenizer, turns, prompt.taught(row))
    prompt_ids, row_ids = ids(asked), ids(whole)
    if whole.startswith(asked) and row_ids[: len(prompt_ids)] != prompt_ids:
        parts = prompt_ids + ids(whole[len(asked) :])
        # Some tokenizers begin every text with a space, which must not be learned.
        if tokenizer.decode(parts) == tokenizer.decode(row_ids):
            row_ids = parts
    pairs = zip(prompt_ids, row_ids, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), len(prompt_ids))
    mask = [int(number >= common) for number in range(len(row_ids))]
    return {"input_ids": row_ids, "completion_mask": mask}
