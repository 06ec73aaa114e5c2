"""Chooses the chat template of a model's prompts, the project's or its own, and the prompt format.

The system prompt is always that of the format (`prompts.PromptFormat`), because it says where the
answer goes.
"""

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from sage_unsloth.prompts import (
    DEFAULT_SYSTEM,
    PROJECT_PROMPT,
    TEMPLATES,
    TURNS,
    PromptFormat,
    project_template,
    recorded_format,
    render_prompt,
    render_solution,
    system_part,
    turns_part,
)
from sage_unsloth.runs.files import read_json
from sage_unsloth.runs.record import read_record

MARK = "what this turn says"


@dataclass(frozen=True)
class TemplateChoice:
    """A template, one of `prompts.TEMPLATES`, and the reason."""

    template: str
    reason: str

    def __str__(self) -> str:
        whose = "this package's" if self.template == "project" else "the model's own"
        return f"chat template: {whose} ({self.reason})"


def choose_template(
    path: str | Path,
    tokenizer: Any,
    stops: list[int],
    expected: str | None = None,
    adapter: str | Path | None = None,
    prompt: PromptFormat = PROJECT_PROMPT,
) -> TemplateChoice:
    """The template of a model's prompts.

    What was trained here, or exported from such a run, keeps the template of its training. Else it
    is the one that is asked for. Else an instruct model has its own, and any other model the
    project's. A base model is told by its template, which it may carry but was not trained on: the
    template ends a turn by a token at which the model does not stop.

    Args:
        stops: the tokens that end its completions (`tokenizers.stop_tokens`).
        expected: one of `prompts.TEMPLATES`, or None.
        adapter: the LoRA folder that will be put on the model.
        prompt: the format of the prompts (`choose_format`).

    Raises:
        ValueError: an unknown template; one that the model was not trained with; "model" where it
            has none, or one without a system turn.
    """
    if expected is not None:
        check_template(expected)
    trained, recorded = _training(path, adapter)[0], recorded_template(path, adapter)
    if recorded is not None:
        if expected not in (None, recorded):
            raise ValueError(
                f"a model needs the template of its training, {recorded!r} for {trained}, got "
                f"{expected!r}"
            )
        return TemplateChoice(recorded, f"{trained} was trained with it")
    if expected == "project":
        return TemplateChoice("project", "as requested")
    own = _own(tokenizer)
    if own is not None and own.endswith((TURNS, turns_part(prompt.reasoning))):
        return TemplateChoice("project", f"{path} carries it")
    if expected == "model":
        _check_own(tokenizer, path, prompt)
        return TemplateChoice("model", "as requested")
    if own is None:
        return TemplateChoice("project", f"{path} has none of its own")
    if not _takes_system_turn(tokenizer, prompt):
        return TemplateChoice("project", f"that of {path} takes no system turn")
    if not set(turn_end(tokenizer)) & set(stops):
        return TemplateChoice(
            "project",
            f"{path} does not stop where its own template ends a turn, so it is a base model",
        )
    return TemplateChoice("model", f"{path} is an instruct model")


def check_template(template: str) -> None:
    """Raises ValueError for a name that is not in `prompts.TEMPLATES`."""
    if template not in TEMPLATES:
        raise ValueError(f"template must be one of {', '.join(TEMPLATES)}, got {template!r}")


def recorded_template(path: str | Path, adapter: str | Path | None = None) -> str | None:
    """The template with which a model or its adapter was trained here; None if it was not."""
    settings = _training(path, adapter)[1]
    # Before templates could be chosen, every run had the project's.
    return None if settings is None else settings.get("template", "project")


def choose_format(
    path: str | Path, expected: PromptFormat | None = None, adapter: str | Path | None = None
) -> PromptFormat:
    """The prompt format: that of the model's training, else the requested one, else the project's.

    Raises:
        ValueError: the model was trained with another one than requested.
    """
    trained, settings = _training(path, adapter)
    if settings is None:
        return expected or PROJECT_PROMPT
    recorded = recorded_format(settings)
    if expected not in (None, recorded):
        raise ValueError(
            f"a model needs the prompt of its training, {_prompt_text(recorded)} for {trained}, "
            f"got {_prompt_text(expected)}. Leave out --system-prompt and --tags (prompt=)"
        )
    return recorded


def _prompt_text(prompt: PromptFormat | None) -> str:
    """A format as command-line options, for a message."""
    words = [] if prompt is None else prompt.options()
    return " ".join(repr(shorten(w, 120)) if " " in w else w for w in words) or "--tags project"


def put_template(
    tokenizer: Any, template: str, path: str | Path, prompt: PromptFormat = PROJECT_PROMPT
) -> None:
    """Sets the chat template, which adds the system prompt to conversations without one.

    Raises:
        ValueError: "model" without a template, or one without a system turn; or a tag that is a
            special token, which is removed from completions.
    """
    special = [tag for tag in prompt.tags if tag in tokenizer.all_special_tokens]
    if special:
        raise ValueError(
            f"a tag must not be a special token, which decoding removes, but {path} has "
            f"{special[0]!r} as one"
        )
    if template == "project":
        tokenizer.chat_template = project_template(prompt)
        return
    _check_own(tokenizer, path, prompt)
    own, system = tokenizer.get_chat_template(), system_part(prompt.system)
    tokenizer.chat_template = system + own.removeprefix(system).removeprefix(DEFAULT_SYSTEM)


def turn_end(tokenizer: Any) -> list[int]:
    """The tokens that the template adds after a solution."""
    text = render_solution(tokenizer, "problem", MARK)
    end = text.rpartition(MARK)[2]
    return tokenizer(end, add_special_tokens=False)["input_ids"]


def check_teaches(
    tokenizer: Any, stops: list[int], path: str | Path, prompt: PromptFormat = PROJECT_PROMPT
) -> None:
    """Checks a template for SFT: a solution continues the prompt, and ends where the model stops.

    Raises:
        ValueError: the template renders a finished solution differently than its prompt, or does
            not end it by a stop token.
    """
    whole = render_solution(tokenizer, "problem", prompt.solution_text("working", "answer"))
    if not whole.startswith(render_prompt(tokenizer, "problem")):
        raise ValueError(
            "SFT needs a chat template in which a solution continues the prompt, but that of "
            f"{path} writes a finished turn differently. Use template 'project'"
        )
    if not set(turn_end(tokenizer)) & set(stops):
        raise ValueError(
            "SFT needs a chat template that ends a solution by a token at which the model stops, "
            f"but that of {path} ends it by other tokens than "
            f"{tokenizer.convert_ids_to_tokens(stops)}. Use template 'project'"
        )


def _training(
    path: str | Path, adapter: str | Path | None
) -> tuple[str | Path | None, dict[str, Any] | None]:
    """Which of the two was trained here, adapters first, and its settings."""
    for folder in (adapter, path):
        # The model of an RL run is merged when a second stage starts from it; it need not be there.
        if folder is None or not (Path(folder).is_dir() or Path(folder).name == "model"):
            continue
        exported = Path(folder) / "export.json"
        run = read_record(Path(folder).absolute().parent) or {}
        export = read_json(exported) if exported.is_file() else {}
        for settings in (run.get("settings", {}), export.get("run", {})):
            if settings.get("stage") in ("sft", "rlvr"):
                return folder, settings
    return None, None


def _own(tokenizer: Any) -> str | None:
    """The tokenizer's chat template; the default one of several."""
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        return None


def _check_own(tokenizer: Any, path: str | Path, prompt: PromptFormat) -> None:
    if _own(tokenizer) is None:
        raise ValueError(
            f"template 'model' needs a model with a chat template, but {path} has none. Use "
            "template 'project'"
        )
    if not _takes_system_turn(tokenizer, prompt):
        raise ValueError(
            f"a chat template must take a system turn, but that of {path} does not. Use template "
            "'project', or ask without a system prompt (--system-prompt none)"
        )


def _takes_system_turn(tokenizer: Any, prompt: PromptFormat) -> bool:
    """Whether the template shows the system prompt, if there is one."""
    from jinja2 import TemplateError

    if prompt.system is None:
        return True
    turns = [{"role": "system", "content": MARK}, {"role": "user", "content": "problem"}]
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except TemplateError:  # raised by templates that allow user and assistant alone
        return False
    return MARK in text
