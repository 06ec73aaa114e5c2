"""The columns of a data set by their role.

Roles are `problem` (text) or `messages` (a conversation), `answer`, and `solution`, the worked text
for SFT. Any other name stays in the row, and rewards get it.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FOUND_BY_NAME = {
    "problem": ("problem", "question", "prompt"),
    "messages": ("messages", "conversation", "prompt"),
    "answer": ("answer",),
    "solution": ("solution",),
}
"""Role -> default names; `prompt` is a problem or messages, by its content."""
RESERVED = (
    "prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state",
    "log_extra", "log_metric", "image", "images", "tools", "environments", "id", "gold",
)  # fmt: skip
"""Names that the trainer or this package uses for something else."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How the columns of a data set are read.

    Attributes:
        names: role -> column; others are found by `FOUND_BY_NAME`.
        answer_pattern: a regular expression with one group, the answer inside the answer column's
            text; the last match counts.
        split: of a hub data set; None takes "train" for training and "test" for evaluation.

    Raises:
        ValueError: a reserved or invalid name; or a pattern without exactly one group.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    answer_pattern: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            if name in RESERVED or not name.isidentifier():
                raise ValueError(
                    "a column must be named problem, messages, answer, solution, or by a word that "
                    f"is not taken ({', '.join(RESERVED)}), got {name!r}"
                )
        if {"problem", "messages"} <= self.names.keys():
            raise ValueError("a row has a problem or messages, got columns for both")
        if self.answer_pattern is None:
            return
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            raise ValueError(
                f"--answer-pattern must be a regular expression, got {self.answer_pattern!r}: "
                f"{error}"
            ) from error
        if groups != 1:
            raise ValueError(
                f"--answer-pattern must have one group, the answer, got {self.answer_pattern!r} "
                f"with {groups}. Put brackets around the answer, as in '#### (.+)', and (?:...) "
                "around anything else"
            )

    def __bool__(self) -> bool:
        return bool(self.names) or self.answer_pattern is not None or self.split is not None

    def options(self) -> list[str]:
        """These settings as command-line options, without `split`."""
        words = [f"{name}={column}" for name, column in self.names.items()]
        pattern = [] if self.answer_pattern is None else ["--answer-pattern", self.answer_pattern]
        return (["--columns", *words] if words else []) + pattern


def parse_columns(
    words: Sequence[str] | None, answer_pattern: str | None = None, split: str | None = None
) -> Columns:
    """`["problem=question", "answer=answer"]` as columns.

    Raises:
        ValueError: not NAME=COLUMN, or a repeated name; or see `Columns`.
    """
    names: dict[str, str] = {}
    for word in words or ():
        name, _, column = word.partition("=")
        if not column or name in names:
            raise ValueError(
                "--columns takes NAME=COLUMN, each name once, as in problem=question "
                f"answer=answer, got {' '.join(words or ())}"
            )
        names[name] = column
    return Columns(names=names, answer_pattern=answer_pattern, split=split)


def find_columns(
    raw: Sequence[dict],
    columns: Columns,
    needed: Sequence[str],
    data: str,
    optional: Sequence[str],
) -> dict[str, str]:
    """role -> column.

    Args:
        raw: rows as read.
        needed, optional: roles besides the problem.
        data: name of the data, for messages.

    Raises:
        ValueError: a column is missing; the message lists the existing ones.
    """
    seen = list(dict.fromkeys(name for row in raw for name in row))
    places = dict(columns.names)
    for name, column in columns.names.items():
        if column not in seen:
            close = difflib.get_close_matches(column, seen, 1)
            hint = f"--columns {name}={close[0]}?" if close else "Name one of these"
            raise ValueError(
                f"--columns must name columns of the data, but {data} has no {column!r}, only "
                f"{', '.join(seen)}. {hint}"
            )
    if not {"problem", "messages"} & places.keys():
        for name, test in (("problem", str), ("messages", list)):
            for column in FOUND_BY_NAME[name]:
                if column in seen and isinstance(raw[0].get(column), test):
                    places.setdefault(name, column)
        if {"problem", "messages"} <= places.keys():
            del places["messages"]
        named = [column for column in FOUND_BY_NAME["problem"] if column in seen]
        if named and not {"problem", "messages"} & places.keys():
            places["problem"] = named[0]  # refused where it is read, with its value
    chat = "messages" in places
    expected = [name for name in ("answer", "solution") if name in (*needed, *optional)]
    for name in expected:
        for column in FOUND_BY_NAME[name]:
            # One column is answer and solution only where a pattern takes the answer out of it.
            if column in seen and (columns.answer_pattern or column not in places.values()):
                places.setdefault(name, column)
    if columns.answer_pattern is not None and "answer" in expected and "answer" not in places:
        raise ValueError(
            f"--answer-pattern needs a column to search, but {data} has {', '.join(seen)}. Name "
            "it: --columns answer=COLUMN"
        )
    lacking = [] if {"problem", "messages"} & places.keys() else ["problem"]
    # A conversation may end in its solution.
    lacking += [n for n in needed if n not in places and not (n == "solution" and chat)]
    if lacking:
        example = " ".join(f"{name}=COLUMN" for name in lacking)
        raise ValueError(
            f"rows need a column for {' and one for '.join(lacking)}, but {data} has "
            f"{', '.join(seen)}. Name it: --columns {example}"
        )
    return places
