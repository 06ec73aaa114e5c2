"""The points that a study compares (methods with settings) and the claims about them.

grpo=0.05,0.4                                two points: GRPO at two values of β
pkpo:k=2,4                                   two values of its rule's own setting
sage-branch:threshold=.8,1.2:ratio=.1,.3     four points: every combination
maxrl=0.05:rehearsal_coef=0.3                one point with two settings
mine:rule=0.2                                `rule` of your mine.py, at β .2
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from sage_unsloth.methods.advantage_rules import advantage_rule
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.training.algorithms import ALGORITHMS, SETTINGS, Algorithm, get_algorithm
from sage_unsloth.training.rlvr_config import RlvrConfig

START = "start"
"""Name of the model that every run starts from."""
STRENGTHS = {
    "dph-rl": "rehearsal_coef",
    "grpo-entropy": "entropy_coef",
    "pkpo": "k",
    "pass-at-k": "k",
}
"""The setting meant by NAME=VALUES; β for algorithms without an entry."""
FORM = "NAME, NAME=VALUES or NAME:SETTING=VALUES, as in grpo=0.05,0.2 or pkpo:k=2,4"
_CLAIM = re.compile(r"(.+?)\s*>\s*(.+?)@(\d+)")


@dataclass(frozen=True)
class Point:
    """An algorithm, and the settings that this point changes."""

    algorithm: str
    settings: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """`grpo beta=0.4`; without settings the algorithm's name alone."""
        return " ".join([self.algorithm, *(f"{name}={value:g}" for name, value in self.settings)])

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_").replace("=", "-").replace(":", ".")

    def configure(
        self, config: RlvrConfig, common: Mapping[str, Any] | None = None
    ) -> tuple[RlvrConfig, Guide | None]:
        """The settings and the guide of a run of this point.

        Args:
            config: shared by all runs.
            common: settings that replace those of every algorithm, as `train --set` does.

        Raises:
            ValueError: a setting does not exist, is not a number, or does not suit the algorithm.
        """
        row, changes = self._apply_settings(common or {})
        row = row.with_settings(changes)
        others = {name: value for name, value in changes.items() if name not in SETTINGS}
        # At once: a setting may suit only the others' new values.
        return replace(config, **(row.all_settings() | others)), row.guide

    def check(self) -> None:
        """Raises ValueError if a setting does not exist or is not a number."""
        self._apply_settings({})

    def _apply_settings(self, common: Mapping[str, Any]) -> tuple[Algorithm, dict[str, Any]]:
        """The algorithm with this point's settings, and what they change of a run."""
        row, changes = get_algorithm(self.algorithm), dict(common)
        for name, value in self.settings:
            row, change = _apply(row, name, value)
            changes |= change
        return row, changes


@dataclass(frozen=True)
class Claim:
    """`better > worse` at pass@k, registered before the runs."""

    better: str
    worse: str
    k: int

    @property
    def text(self) -> str:
        return f"{self.better}>{self.worse}@{self.k}"


def parse_methods(texts: Sequence[str]) -> tuple[Point, ...]:
    """The points of all methods, in their order.

    Raises:
        ValueError: another form, an unknown algorithm or setting, or a point named twice.
    """
    points = [point for text in texts for point in _parse_method(text)]
    names = [point.name for point in points]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"every point must be named once, got {twice[0]!r} twice")
    if not points:
        raise ValueError("a study needs a method. Give --methods grpo=0.05 maxrl=0.05")
    return tuple(points)


def _parse_method(text: str) -> list[Point]:
    name, *parts = text.split(":")
    if parts and "=" not in name and not re.fullmatch(r"[A-Za-z_]\w*=.+", parts[0]):
        name = f"{name}:{parts.pop(0)}"  # module:name
    elif parts and "=" not in name and re.fullmatch(r"[\w.]+", name) and name not in ALGORITHMS:
        name = f"{name}:{parts.pop(0)}"  # module:name=VALUES
    name, equals, values = name.partition("=")
    row = get_algorithm(name)
    if row.guide is not None and "teacher_logps" in row.guide.needs:
        raise ValueError(f"{name} needs a teacher, which a study does not have")
    choices = [(STRENGTHS.get(name, "beta"), values)] if equals else []
    for part in parts:
        setting, _, values = part.partition("=")
        choices.append((setting, values))
    names = [setting for setting, _ in choices]
    if twice := [setting for setting in names if names.count(setting) > 1]:
        raise ValueError(f"a setting must be given once, got {twice[0]!r} twice in {text!r}")
    try:
        grid = [[(s, float(v)) for v in values.split(",")] for s, values in choices]
    except ValueError as error:
        raise ValueError(f"a method must be {FORM}, with numbers, got {text!r}") from error
    points = [Point(name, combination) for combination in itertools.product(*grid)]
    for point in points:
        point.check()
    return points


def _apply(row: Algorithm, name: str, value: float) -> tuple[Algorithm, dict[str, Any]]:
    """The algorithm with one more setting, of the run, its guide or its advantage rule."""
    kinds = {field.name: field.type for field in fields(RlvrConfig)}
    numbers = [n for n, kind in kinds.items() if kind in (int, float) and n != "seed"]
    guide = row.guide
    if name in numbers:
        if kinds[name] is int and value != int(value):
            raise ValueError(f"{name} must be a whole number, got {value:g}")
        return row, {name: int(value) if kinds[name] is int else value}
    if is_dataclass(guide) and name in {field.name for field in fields(guide)}:
        return replace(row, guide=replace(guide, **{name: value})), {}  # pyright: ignore
    rule = advantage_rule(row.advantages)
    if rule.is_grpo or name in kinds:
        raise ValueError(
            f"a point's setting must be a number of RLVR ({', '.join(numbers)}), the guide or the "
            f"rule for advantages, got {name!r}"
        )
    number = int(value) if value == int(value) else value
    settings = {**row.settings, "advantages": f"{rule.text},{name}={number}"}
    return replace(row, settings=settings), {}


def parse_claims(
    texts: Sequence[str], points: Sequence[Point], ks: Sequence[int], *, smoke: bool = False
) -> list[Claim]:
    """Claims of the form `a>b@k`, of points (or `start`) at a k that is reported.

    Args:
        texts: the claims.
        points: of the study.
        ks: that are reported.
        smoke: lower a k that this size cannot report.

    Raises:
        ValueError: another form, an unknown point, or a k that is not reported.
    """
    known, claims = {point.name for point in points} | {START}, []
    for text in texts:
        match = _CLAIM.fullmatch(text.strip())
        if not match:
            raise ValueError(f"a claim must be A>B@K, as in 'maxrl>grpo@8', got {text!r}")
        better, worse = (_point_name(side, known) for side in match.group(1, 2))
        k = min(int(match[3]), ks[-1]) if smoke else int(match[3])
        if k not in ks:
            raise ValueError(f"a claim's k must be one of {list(ks)}, got {text!r}")
        claims.append(Claim(better, worse, k))
    return claims


def _point_name(text: str, known: set[str]) -> str:
    """The point with this name, or in the form of `--methods`."""
    if text in known:
        return text
    (name, *more) = [point.name for point in _parse_method(text)]
    if more or name not in known:
        raise ValueError(
            f"a claim must be about the study's points ({sorted(known)}), got {text!r}"
        )
    return name


def find_twin(
    point: Point, points: Sequence[Point], rlvr: RlvrConfig, common: Mapping[str, Any]
) -> str | None:
    """The point with the same settings as a guided one but no guide, if any."""
    config, guide = point.configure(rlvr, common)
    if guide is None:
        return None
    for other in points:
        settings, other_guide = other.configure(rlvr, common)
        if other_guide is None and settings == config:
            return other.name
    return None


def same_method(point: Point, points: Sequence[Point]) -> list[Point]:
    """The points that differ from this one in their first setting alone, by ascending value."""
    if not point.settings:
        return [point]
    (name, _), *rest = point.settings
    line = [
        other
        for other in points
        if other.algorithm == point.algorithm
        and other.settings
        and other.settings[0][0] == name
        and list(other.settings[1:]) == rest
    ]
    return sorted(line, key=lambda other: other.settings[0][1])
