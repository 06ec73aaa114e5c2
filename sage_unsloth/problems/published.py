"""The published benchmarks: hub location, number of problems, and how rows are read."""

from collections.abc import Callable
from dataclasses import dataclass, field

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.checkers import ROLES, ROLES_INSTRUCTION, roles
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.problems.sources import Source

KNIGHTS_REVISION = "2f68547989981b1af37cb3dde5fdefa847aa8619"
PEOPLE = range(2, 9)


@dataclass(frozen=True, kw_only=True)
class Published:
    """How a benchmark is read.

    Attributes:
        sources: its parts on the hub, with their own `num_rows`.
        num_rows: required number of rows from any source; None does not check.
        integer: answers are integers, however written ("025", 27.0).
        read: (row) -> fields that replace those found by name.
    """

    sources: tuple[Source, ...] = ()
    num_rows: int | None = None
    integer: bool = False
    read: Callable[[dict], dict] = field(default=lambda row: {})
    keep: Callable[[dict], bool] = field(default=lambda row: True)
    checker: Checker = MATH


def _read_gsm8k(row: dict) -> dict:
    """The number after the last `####`."""
    return {"answer": row["answer"].rpartition("####")[2]} if "answer" in row else {}


def _read_knights(row: dict) -> dict:
    """The puzzle with the form of the answer, and everybody's role."""
    columns = {"quiz", "names", "solution"}
    if not columns <= row.keys():
        raise ValueError(f"needs the columns {sorted(columns)}, but saw {sorted(row)}")
    given = ", ".join(
        f"{name} is a {'knight' if honest else 'knave'}"
        for name, honest in zip(row["names"], row["solution"], strict=True)
    )
    if "solution_text" in row and roles(row["solution_text"]) != roles(given):
        raise ValueError(f"`solution` says {given!r}, `solution_text` {row['solution_text']!r}")
    problem = f"{row['quiz']}\n{ROLES_INSTRUCTION}"
    return {"problem": problem, "answer": given, "level": len(row["names"])}


def _knights(people: int) -> Source:
    """The puzzles about this many people."""
    return Source(
        hub_id="K-and-K/knights-and-knaves",
        config="test",
        split=f"{people}ppl",
        revision=KNIGHTS_REVISION,
        num_rows=100,
    )


_MATH500 = Source(
    hub_id="HuggingFaceH4/MATH-500",
    split="test",
    revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    num_rows=500,
)
PUBLISHED = {
    "aime24": Published(
        sources=(Source(hub_id="HuggingFaceH4/aime_2024", split="train", num_rows=30),),
        num_rows=30,
        integer=True,
    ),
    "aime25": Published(
        sources=tuple(
            Source(
                hub_id="opencompass/AIME2025", config=f"AIME2025-{part}", split="test", num_rows=15
            )
            for part in ("I", "II")
        ),
        num_rows=30,
        integer=True,
    ),
    "amc23": Published(
        sources=(Source(hub_id="math-ai/amc23", split="test", num_rows=40),),
        num_rows=40,
        integer=True,
    ),
    "math500": Published(sources=(_MATH500,), num_rows=500),
    "math500-l5": Published(
        sources=(_MATH500,), num_rows=134, keep=lambda row: str(row.get("level")) == "5"
    ),
    "minerva": Published(
        sources=(Source(hub_id="math-ai/minervamath", split="test", num_rows=272),), num_rows=272
    ),
    "gsm8k": Published(
        sources=(Source(hub_id="openai/gsm8k", config="main", split="test", num_rows=1319),),
        num_rows=1319,
        integer=True,
        read=_read_gsm8k,
    ),
    "knights-and-knaves": Published(
        sources=tuple(map(_knights, PEOPLE)), num_rows=700, read=_read_knights, checker=ROLES
    ),
} | {
    f"knights-and-knaves:{people}": Published(
        sources=(_knights(people),),
        num_rows=100,
        read=_read_knights,
        checker=ROLES,
        keep=lambda row, people=people: len(row.get("names", ())) == people,
    )
    for people in PEOPLE
}
"""By the name that `load_benchmark` takes."""
TOGETHER = {"aime": ("aime24", "aime25")}
"""Names for several of them."""
