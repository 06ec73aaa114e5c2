"""Settings on the command line: an option for each, and files of settings."""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_json
from sage_unsloth.runs.settings import GROUPS, Setting, config_settings

CONFIG = "--config"


class SettingAction(argparse.Action):
    """Adds NAME=VALUE to `settings`, the list of `--set`, so that the last one wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        negated = option_string is not None and option_string.startswith("--no-")
        value = "False" if negated else values
        namespace.settings = [*(namespace.settings or ()), f"{self.dest}={value}"]


def add_set(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds `--set`, which collects NAME=VALUE in `settings`."""
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help=text,
    )


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds `--processes`, for commands that train several runs side by side."""
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="RL runs at a time (default: as many as cores and memory allow)",
    )


def add_groups(parser: argparse.ArgumentParser) -> dict[str, Any]:
    return {group: parser.add_argument_group(group) for group in GROUPS}


def add_settings(groups: Mapping[str, Any], stage: type) -> None:
    """An option for each setting of a stage's dataclass, in its group."""
    for setting in config_settings(stage).values():
        option = f"--{setting.name.replace('_', '-')}"
        keywords: dict[str, Any] = {"metavar": _metavar(setting), "help": _help(setting)}
        options = [option]
        # --x, --no-x and --x false.
        if setting.type is bool:
            options.append(f"--no-{option[2:]}")
            keywords |= {"nargs": "?", "const": "True", "metavar": "BOOL"}
        groups[setting.group].add_argument(
            *options, action=SettingAction, dest=setting.name, default=argparse.SUPPRESS, **keywords
        )


def _metavar(item: Setting) -> str:
    if item.choices:
        return "{" + ",".join(item.choices) + "}"
    kinds = {int: "N", float: "X", str: "TEXT"}
    return kinds.get(type(item.default), "N" if item.default is None else "A,B")


def _help(item: Setting) -> str:
    limits = f", {item.limits}" if item.limits else ""
    return f"{item.text} (default: {item.default_text}{limits})".replace("%", "%%")


def expand_config(words: Sequence[str]) -> list[str]:
    """Replaces `--config FILE` by the options in the file; the command line wins.

    Raises:
        ValueError: the file cannot be read, or is the record of another command.
    """
    command, *rest = words
    options: list[str] = []
    others: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, file = word.partition("=")
        if name != CONFIG:
            others.append(word)
        elif not equals and not rest:
            raise ValueError(f"{CONFIG} needs a FILE of settings, .yaml, .toml or a run's run.json")
        else:
            options += _read_options(Path(file if equals else rest.pop(0)), command)
    # The last one of an option wins, so those of the file come first.
    return [command, *options, *others]


def _read_options(file: Path, command: str) -> list[str]:
    """The options in a file of settings, or in the record of a run."""
    if not file.is_file():
        raise ValueError(f"{CONFIG} must name a file, got {file}")
    content = _read(file)
    if "settings" not in content or "environment" not in content:
        return _as_options(content)
    words = content.get("command")
    if not words:
        raise ValueError(
            f"{CONFIG} repeats the run of a command, but {file} was not written by one"
        )
    if words[0] != command:
        raise ValueError(
            f"{file} is a record of `{words[0]}`, got it for `{command}`. Run `{words[0]} {CONFIG} "
            f"{file}`"
        )
    stage = _stage(command)
    recorded = content["settings"] | content["free_settings"]
    known = {item.name for item in fields(stage) if item.metadata["option"]}
    known -= {"teacher"}  # recorded by its weights; the words name its folder
    # Settings by value: a preset's defaults may have changed since the run.
    return [*words[1:], *_as_options({k: v for k, v in recorded.items() if k in known and v != []})]


def _stage(command: str) -> type:
    from sage_unsloth.training.rlvr_config import RlvrConfig
    from sage_unsloth.training.sft_config import SftConfig

    return {"train": RlvrConfig, "sft": SftConfig}[command]


def _read(file: Path) -> dict[str, Any]:
    """The object in a JSON, TOML or YAML file."""
    if file.suffix == ".json":
        return read_json(file)
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".toml":
            return tomllib.loads(text)
        import yaml

        content = yaml.safe_load(text)
    # Each library has its own exceptions.
    except Exception as error:
        raise ValueError(f"{file} must be YAML, TOML or JSON by its suffix, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold names and values, got {content!r:.100}")
    return content


def _as_options(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names and values as options: `{"lora": {"rank": 16}}` is `--lora.rank 16`."""
    words: list[str] = []
    for name, value in content.items():
        option = f"--{prefix}{name.replace('_', '-')}"
        if name == "columns" and isinstance(value, Mapping):
            words += [option, *(f"{role}={column}" for role, column in value.items())]
        elif isinstance(value, Mapping):
            words += _as_options(value, f"{name}.")
        elif name == "reward":
            words += [word for reward in _as_list(value) for word in (option, reward)]
        elif name in ("columns", "tags"):
            words += [option, *_as_list(value)]
        elif isinstance(value, bool) and name.replace("_", "-") in FLAGS:
            words += [option] * value
        else:
            words += [option, ",".join(value) if isinstance(value, list) else f"{value}"]
    return words


FLAGS = ("smoke", "force", "allow-unconfined")
"""Options without a value."""


def _as_list(value: Any) -> list[str]:
    return [f"{item}" for item in value] if isinstance(value, list) else [f"{value}"]


def recorded_command(words: Sequence[str]) -> list[str]:
    """The words of a command without `--out`, for `run.json`."""
    selected, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == "--out":
            skip = True
        elif not word.startswith("--out="):
            selected.append(word)
    return json.loads(json.dumps(selected))


@contextmanager
def naming_options(stage: Any, *, by_set: bool = False) -> Iterator[None]:
    """Writes the fix in an error (". Set beta=0.05, or …") as options of the command line.

    Args:
        stage: a stage's dataclass, or an instance.
        by_set: the command has only `--set`.
    """
    names = "|".join([item.name for item in fields(stage)] + [r"lora\.\w+"])
    try:
        yield
    except ValueError as error:
        # Only the fix is rewritten: the rule may quote values that are not options.
        parts = re.fullmatch(r"(.*(?:\. |; ))(.*)", str(error), re.DOTALL)
        if parts and len(error.args) == 1:
            pattern = (
                r"(?<![\w.-])(?<!--columns )(?:--set |(?P<verb>[Ss])et )?"
                rf"(?P<name>{names})=(?P<value>'[^']*'|[^\s,;)]+)"
            )
            remedy = re.sub(pattern, partial(_as_option, by_set=by_set), parts[2])
            error.args = (parts[1] + remedy,)
        raise


def _as_option(match: re.Match[str], *, by_set: bool) -> str:
    name, value = match["name"], match["value"]
    verb = {"s": "give ", "S": "Give ", None: ""}[match["verb"]]
    if by_set:
        return f"{verb}--set {name}={value}"
    return f"{verb}--{name.replace('_', '-')} " + value.strip("'")
