"""A setting is a field of a stage's dataclass with its default, range and one line of text.

The command line, `--help`, the documentation's tables and `run.json` are generated from it.

    beta: float = setting(0.05, "KL coefficient β", OBJECTIVE, low=0, trainer=True)
"""

import ast
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Stage = TypeVar("Stage")

MODEL, DATA, ROLLOUT_GROUP = "model and LoRA", "data", "rollouts"
OBJECTIVE, OPTIMISER = "loss and guide", "optimiser"
EVALUATION, SAVING = "evaluation", "saving"
GROUPS = (MODEL, DATA, ROLLOUT_GROUP, OBJECTIVE, OPTIMISER, EVALUATION, SAVING)
"""In the order of `--help`."""


def setting(
    default: Any,
    text: str,
    group: str,
    *,
    above: float | None = None,
    low: float | None = None,
    high: float | None = None,
    why: str = "",
    free: bool = False,
    trainer: bool = False,
    option: bool = True,
) -> Any:
    """A field of a stage's dataclass.

    Args:
        default: the paper's value if it gives one.
        text: meaning and unit, on one line.
        group: one of `GROUPS`.
        above, low, high: it must be > `above`, >= `low`, <= `high`.
        why: the reason for the range, for the error.
        free: may change when a run is resumed, because no result depends on it.
        trainer: the trainer's arguments have it under the same name.
        option: False for settings with their own options on the command line.
    """
    metadata = {"text": text, "group": group, "above": above, "low": low, "high": high}
    metadata |= {"why": why, "free": free, "trainer": trainer, "option": option}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """A setting as a user gives it.

    Attributes:
        name: "beta", or "lora.rank" for a nested dataclass.
        text, group, free, trainer: see `setting`.
        limits: "> 0", "in [0, 1]", or empty.
    """

    name: str
    default: Any
    type: Any
    text: str
    group: str
    free: bool
    trainer: bool
    limits: str

    @property
    def choices(self) -> tuple[str, ...]:
        """Of a `Literal`; else empty."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def default_text(self) -> str:
        """The default as written on the command line."""
        if isinstance(self.default, tuple):
            return ",".join(self.default) or "none"
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return "none" if self.default in (None, "") else str(self.default)


def config_settings(config: Any) -> dict[str, Setting]:
    """The settings of a stage's dataclass, or of an instance, by name, including those of `lora`.

    Without fields that have their own options (`option=False`). The stage's own come before shared
    ones.
    """
    stage = config if isinstance(config, type) else type(config)
    hints, result = get_type_hints(stage), {}
    for item in _own_first(stage):
        if not item.metadata["option"]:
            continue
        default = getattr(config, item.name)
        if hasattr(default, "__dataclass_fields__"):
            within = config_settings(default)
            result |= {
                f"{item.name}.{name}": replace(inner, name=f"{item.name}.{name}")
                for name, inner in within.items()
            }
            continue
        known = {name: item.metadata[name] for name in ("text", "group", "free", "trainer")}
        limits = _limits(item.metadata)
        result[item.name] = Setting(item.name, default, hints[item.name], limits=limits, **known)
    return result


def _own_first(stage: type) -> list[Any]:
    """The fields of a stage's dataclass, inherited ones last."""
    return sorted(fields(stage), key=lambda item: item.name not in stage.__annotations__)


def names_where(stage: type, mark: str) -> tuple[str, ...]:
    """Names of the fields marked `free` or `trainer`."""
    return tuple(item.name for item in fields(stage) if item.metadata[mark])


def values_where(config: Any, mark: str) -> dict[str, Any]:
    """Their values in an instance, by name."""
    return {name: getattr(config, name) for name in names_where(type(config), mark)}


def check_settings(config: Any) -> None:
    """Checks ranges and choices of every field; ValueError with the rule and the value."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, rule = getattr(config, item.name), item.metadata
        if get_origin(hints[item.name]) is Literal and value not in get_args(hints[item.name]):
            choices = ", ".join(map(str, get_args(hints[item.name])))
            raise ValueError(f"{item.name} must be one of {choices}, got {value!r}")
        if value is None or not (limits := _limits(rule)):
            continue
        inside = rule["above"] is None or value > rule["above"]
        inside &= rule["low"] is None or value >= rule["low"]
        inside &= rule["high"] is None or value <= rule["high"]
        if not inside:
            because = f" {rule['why']}" if rule["why"] else ""
            raise ValueError(f"{item.name} must be {limits}{because}, got {value}")


def _limits(rule: Any) -> str:
    """The range of a field, such as "> 0" or "in [0, 1]"; empty without one."""
    above, low, high = rule["above"], rule["low"], rule["high"]
    if high is None:
        return f"> {above}" if above is not None else f">= {low}" if low is not None else ""
    return f"in {f'({above}' if above is not None else f'[{low}'}, {high}]"


def parse_settings(texts: Iterable[str], defaults: Any) -> dict[str, Any]:
    """`["max_steps=200", "lora.rank=16"]` as fields of a config, each of its default's type.

    Args:
        texts: NAME=VALUE each.
        defaults: a stage's dataclass, or an instance; `lora.rank` changes its `lora`.

    Raises:
        ValueError: not NAME=VALUE, an unknown name (with the nearest), or a value of another type.
    """
    known = config_settings(defaults)
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, got {text!r}")
        name = name.replace("-", "_")
        if name not in known:
            raise ValueError(
                f"--set takes one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
            )
        given[name] = _parse_value(known[name], value)
    lora = {name.removeprefix("lora."): given.pop(name) for name in list(given) if "." in name}
    return given | ({"lora": replace(defaults.lora, **lora)} if lora else {})


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" where a known name is near, else an empty text."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f". Did you mean {close[0]}?" if close else ""


def _parse_value(item: Setting, text: str) -> Any:
    """The text as a value of the setting's type."""
    if isinstance(item.default, tuple):  # names with commas between, in quotes and brackets or not
        names = [name.strip("()'\" ") for name in text.split(",")]
        return tuple(name for name in names if name)
    types = get_args(item.type) or (item.type,)
    try:
        value = text if str in types or item.choices else ast.literal_eval(_as_python(text))
    except (ValueError, SyntaxError):
        raise ValueError(
            f"{item.name} must be a value like {item.default!r}, got {text!r}"
        ) from None
    if item.choices:
        if value not in item.choices:
            raise ValueError(
                f"{item.name} must be one of {', '.join(item.choices)}, got "
                f"{value!r}{did_you_mean(value, item.choices)}"
            )
        return value
    if float in types and type(value) is int:
        value = float(value)
    if type(value) not in types and not (value is None and NoneType in types):
        raise ValueError(f"{item.name} must be a value like {item.default!r}, got {value!r}")
    return value


def _as_python(text: str) -> str:
    """`true`, `false` and `none` in the spelling of Python."""
    return {"true": "True", "false": "False", "none": "None"}.get(text.lower(), text)


def attributes_text(stage: type) -> str:
    lines = ["", "    Attributes:"]
    for item in _own_first(stage):
        limits = _limits(item.metadata)
        shown = f" ({limits})" if limits else ""
        lines.append(f"        {item.name}: {item.metadata['text']}{shown}.")
    return "\n".join([*lines, ""])


def document_settings(stage: type[Stage]) -> type[Stage]:
    """The dataclass with its settings listed in its docstring."""
    stage.__doc__ = f"{stage.__doc__}\n{attributes_text(stage)}"
    return stage


def settings_tables(stage: type) -> str:
    """Every setting of a stage as Markdown tables, one per group."""
    parts: list[str] = []
    for group in GROUPS:
        rows = [item for item in config_settings(stage).values() if item.group == group]
        if rows:
            parts += [f"## {group[0].upper()}{group[1:]}", "", "| option | default | what it is |"]
            parts += ["|---|---|---|", *(_row(row) for row in rows), ""]
    return "\n".join(parts).rstrip()


def _row(item: Setting) -> str:
    values: Sequence[str] = item.choices or ([item.limits] if item.limits else [])
    text = item.text + (f" ({', '.join(values)})" if values else "")
    name = item.name.replace("_", "-")
    return f"| `--{name}` | `{item.default_text}` | {text} |".replace("|V|", "\\|V\\|")
