"""Tokenizers: the chat template, the pad token, and the tokens that end a completion."""

import logging
from pathlib import Path
from typing import Any

from sage_unsloth.models.templates import (
    TemplateChoice,
    choose_format,
    choose_template,
    put_template,
)
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat

PAD_TOKEN = "<|pad|>"

logger = logging.getLogger(__name__)


def load_tokenizer(
    path: str | Path,
    template: str | None = None,
    adapter: str | Path | None = None,
    prompt: PromptFormat | None = None,
) -> Any:
    return open_tokenizer(path, template, adapter, prompt)[0]


def open_tokenizer(
    path: str | Path,
    template: str | None = None,
    adapter: str | Path | None = None,
    prompt: PromptFormat | None = None,
) -> tuple[Any, TemplateChoice]:
    """The tokenizer of a model with chat template and pad token, and the reason for its template.

    Args:
        template: one of `prompts.TEMPLATES`; None uses `templates.choose_template`.
        adapter: the LoRA folder for the model; its training may decide the template.
        prompt: the format; None uses `templates.choose_format`.

    Raises:
        ValueError: it cannot be loaded, it has no EOS token, no token can serve as pad, or see
            `choose_template` and `choose_format`.
    """
    tokenizer, config, stops = _read_tokenizer(path)
    prompt = choose_format(path, prompt, adapter)
    choice = choose_template(path, tokenizer, stops, template, adapter, prompt)
    return prepare_tokenizer(tokenizer, config, stops, path, choice.template, prompt), choice


def tokenizer_as_sampled(path: str | Path, template: str, prompt: PromptFormat) -> Any:
    """The tokenizer with this template and prompt, whatever the model was trained with: for
    completions that another model sampled.
    """
    tokenizer, config, stops = _read_tokenizer(path)
    return prepare_tokenizer(tokenizer, config, stops, path, template, prompt)


def _read_tokenizer(path: str | Path) -> tuple[Any, Any, list[int]]:
    """Tokenizer, the model's config, and stop tokens."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        config = AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(not_found_message(path, error)) from error
    return tokenizer, config, load_stop_tokens(path, tokenizer)


def load_stop_tokens(path: str | Path, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: EOS, and those of the generation config."""
    from transformers import GenerationConfig

    try:
        return stop_tokens(GenerationConfig.from_pretrained(path), tokenizer)
    except OSError:  # a model need not have one
        return stop_tokens(None, tokenizer)


def stop_tokens(generation: Any, tokenizer: Any) -> list[int]:
    """The `eos_token_id` of a generation config (None, one or several), and the tokenizer's."""
    result = getattr(generation, "eos_token_id", None)
    result = result if isinstance(result, list) else [result]
    return sorted({*result, tokenizer.eos_token_id} - {None})


def not_found_message(path: str | Path, error: Exception) -> str:
    """The message for a model that cannot be loaded."""
    why = str(error).partition("\n")[0].rstrip(".")
    return (
        f"a model must be a folder or a hub id, but {str(path)!r} could not be loaded: {why:.300}. "
        "Check the path or the network"
    )


def prepare_tokenizer(
    tokenizer: Any,
    config: Any,
    stops: list[int],
    path: str | Path,
    template: str = "project",
    prompt: PromptFormat = PROJECT_PROMPT,
) -> Any:
    """Sets chat template, left padding, and a pad token that ends no completion.

    Unsloth distinguishes completion and padding by the pad id alone. So if the pad token is
    missing, or is a stop token, an unused special token replaces it.

    Args:
        tokenizer: is changed in place.
        config: of the model, for the rows of the embedding.
        stops: see `stop_tokens`.

    Raises:
        ValueError: no EOS token, no token can serve as pad, or see `templates.put_template`.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {path} must have an EOS token, because the chat template ends each "
            "turn with it. Set tokenizer.eos_token and save it"
        )
    tokenizer.padding_side = "left"
    put_template(tokenizer, template, path, prompt)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stops:
        before = tokenizer.pad_token
        rows = config.get_text_config().vocab_size
        tokenizer.pad_token = _unused_token(tokenizer, stops, rows, path)
        logger.info("Pad token of %s: %r instead of %r.", path, tokenizer.pad_token, before)
    return tokenizer


def _unused_token(tokenizer: Any, stops: list[int], rows: int, path: str | Path) -> str:
    """A special token for padding or reserved; else a new one, if the embedding has room."""
    special = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number not in stops and number < rows
    }
    for word in ("pad", "reserved", "unused"):
        for content in special:
            if word in content.lower() and content != tokenizer.bos_token:
                return content
    if len(tokenizer) < rows:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
        return PAD_TOKEN
    raise ValueError(
        "the tokenizer must have a pad token other than EOS, by which Unsloth finds the end of a "
        f"completion, got pad_token={tokenizer.pad_token!r}, eos_token={tokenizer.eos_token!r} in "
        f"{path}, no reserved token, and no spare row among the embedding's {rows}. Enlarge the "
        "embedding by one row and save model and tokenizer"
    )
