"""Whose chat template makes a model's prompts: the project's, or the model's own.

Either way the system prompt is the project's, because it says where the answer goes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.prompts import (
    CHAT_TEMPLATE,
    DEFAULT_SYSTEM,
    SOLUTION_END,
    SYSTEM_PROMPT,
    TEMPLATES,
    TURNS,
    prompt_messages,
    render_prompt,
    render_solution,
)
from sage_unsloth.runs.files import read_json


@dataclass(frozen=True)
class TemplateChoice:
    """A template, one of `prompts.TEMPLATES`, and why it is the one."""

    template: str
    reason: str

    def __str__(self) -> str:
        whose = "this package's" if self.template == "project" else "the model's own"
        return f"chat template: {whose} ({self.reason})"


def choose_template(
    path: str | Path,
    tokenizer: Any,
    stops: list[int],
    wanted: str | None = None,
    adapter: str | Path | None = None,
) -> TemplateChoice:
    """The template of a model's prompts.

    What was trained here, or exported from such a run, keeps the template of its training. Else it
    is the one that is asked for. Else an instruct model has its own, and any other model the
    project's. A base model is told by its template, which it may carry but was not trained on: the
    template ends a turn by a token at which the model does not stop.

    Args:
        path: model folder or hub id.
        tokenizer: the model's, as loaded.
        stops: the tokens that end its completions (`tokenizers.stop_tokens`).
        wanted: one of `prompts.TEMPLATES`, or None.
        adapter: the LoRA folder that will be put on the model.

    Raises:
        ValueError: an unknown template; one that the model was not trained with; "model" where it
            has none, or one without a system turn.
    """
    if wanted is not None:
        check_template(wanted)
    trained, recorded = _training(path, adapter)
    if recorded is not None:
        if wanted not in (None, recorded):
            raise ValueError(
                "a model is asked with the template that it was trained with; "
                f"{trained} was trained with template {recorded!r}, and {wanted!r} is asked for; "
                f"give {recorded!r}, or leave it out"
            )
        return TemplateChoice(recorded, f"{trained} was trained with it")
    if wanted == "project":
        return TemplateChoice("project", "as asked for")
    own = _own(tokenizer)
    if own is not None and own.endswith(TURNS):
        return TemplateChoice("project", f"{path} carries it")
    if wanted == "model":
        _check_own(tokenizer, path)
        return TemplateChoice("model", "as asked for")
    if own is None:
        return TemplateChoice("project", f"{path} has none of its own")
    if not _takes_system_turn(tokenizer):
        return TemplateChoice("project", f"that of {path} takes no system turn")
    if not set(turn_end(tokenizer)) & set(stops):
        return TemplateChoice(
            "project",
            f"{path} does not stop where its own template ends a turn, so it is a base model",
        )
    return TemplateChoice("model", f"{path} is an instruct model")


def check_template(template: str) -> None:
    """Raises ValueError if it is not one of `prompts.TEMPLATES`."""
    if template not in TEMPLATES:
        raise ValueError(f"template must be one of {', '.join(TEMPLATES)}; got {template!r}")


def recorded_template(path: str | Path, adapter: str | Path | None = None) -> str | None:
    """The template with which a model or its adapter was trained here; None for any other model."""
    return _training(path, adapter)[1]


def put_template(tokenizer: Any, template: str, path: str | Path) -> None:
    """Gives the tokenizer its chat template, which adds the project's system prompt where a
    conversation has none.

    Raises:
        ValueError: "model" where the tokenizer has none, or one without a system turn.
    """
    if template == "project":
        tokenizer.chat_template = CHAT_TEMPLATE
        return
    _check_own(tokenizer, path)
    own = tokenizer.get_chat_template()
    tokenizer.chat_template = DEFAULT_SYSTEM + own.removeprefix(DEFAULT_SYSTEM)


def turn_end(tokenizer: Any) -> list[int]:
    """The tokens that the template puts behind a solution."""
    text = render_solution(tokenizer, "problem", "working", "answer")
    end = text.rpartition(SOLUTION_END)[2]
    return tokenizer(end, add_special_tokens=False)["input_ids"]


def check_teaches(tokenizer: Any, stops: list[int], path: str | Path) -> None:
    """A template for SFT: a solution continues the prompt, and ends where the model stops.

    Raises:
        ValueError: the template writes a finished solution otherwise than it asks for one, or does
            not end it by a token at which the model stops.
    """
    whole = render_solution(tokenizer, "problem", "working", "answer")
    if not whole.startswith(render_prompt(tokenizer, "problem")):
        raise ValueError(
            "SFT needs a chat template in which a solution continues the prompt; that of "
            f"{path} writes a finished turn in another way; take template 'project'"
        )
    if not set(turn_end(tokenizer)) & set(stops):
        raise ValueError(
            "SFT needs a chat template that ends a solution by a token at which the model stops; "
            f"that of {path} ends it by other tokens than {tokenizer.convert_ids_to_tokens(stops)}"
            "; take template 'project'"
        )


def _training(path: str | Path, adapter: str | Path | None) -> tuple[str | Path | None, str | None]:
    """Which of the two was trained here, and the template of that; an adapter's comes first."""
    for folder in (adapter, path):
        if folder is None or not Path(folder).is_dir():
            continue
        places = ((Path(folder).absolute().parent / "run.json", "settings"),)
        places += ((Path(folder) / "export.json", "run"),)
        for file, key in places:
            settings = read_json(file).get(key, {}) if file.is_file() else {}
            if settings.get("stage") in ("sft", "rlvr"):
                # Before templates could be chosen, every run had the project's.
                return folder, settings.get("template", "project")
    return None, None


def _own(tokenizer: Any) -> str | None:
    """The tokenizer's chat template; of several the default one."""
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        return None


def _check_own(tokenizer: Any, path: str | Path) -> None:
    if _own(tokenizer) is None:
        raise ValueError(
            f"template 'model' needs a model with a chat template of its own; {path} has none; "
            "take template 'project'"
        )
    if not _takes_system_turn(tokenizer):
        raise ValueError(
            "a chat template must take a system turn, because that says where the answer goes; "
            f"that of {path} takes none; take template 'project'"
        )


def _takes_system_turn(tokenizer: Any) -> bool:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            prompt_messages("problem"), add_generation_prompt=True, tokenize=False
        )
    except TemplateError:  # raised by templates that allow user and assistant alone
        return False
    return SYSTEM_PROMPT in text
