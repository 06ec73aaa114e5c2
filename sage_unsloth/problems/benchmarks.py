"""Benchmarks as rows of one form, from the hub at pinned revisions or from local files, with counts
that are checked.

A row: `id` (unique over all benchmarks), `problem`, `answer` (text), `source`, and where the
benchmark has them `level` and `gold`, what its checker compares with where that is not `answer`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.checkers import (
    REASONING_GYM,
    ROLES,
    ROLES_INSTRUCTION,
    reasoning_gym_gold,
    roles,
)
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader, own_grades
from sage_unsloth.grading.mathematics import MATH, plain_number
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.sources import SUFFIXES, Source, read_source
from sage_unsloth.runs.record import package_version

REASONING_GYM_ITEMS, REASONING_GYM_SEED = 100, 3407  # a training set from it needs another seed
KNIGHTS_REVISION = "2f68547989981b1af37cb3dde5fdefa847aa8619"
PEOPLE = range(2, 9)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Problems to evaluate on.

    Attributes:
        name: as `load_benchmark` was given it.
        rows: see the module.
        provenance: where the rows are from: hub id and revision, or file and digest.
        checker: what makes an answer right.
    """

    name: str
    rows: list[dict]
    provenance: list[dict]
    checker: Checker = MATH


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """How one published benchmark is read.

    Attributes:
        sources: its parts on the hub; their `num_rows` are checked there.
        num_rows: rows that the benchmark must have, from wherever it is read.
        integer: answers are integers, however they are written ("025", 27.0).
        read: (row) -> fields that replace those found by name.
        keep: which rows belong to it.
        checker: what makes an answer right.
    """

    sources: tuple[Source, ...]
    num_rows: int
    integer: bool = False
    read: Callable[[dict], dict] = field(default=lambda row: {})
    keep: Callable[[dict], bool] = field(default=lambda row: True)
    checker: Checker = MATH


def _read_gsm8k(row: dict) -> dict:
    """The number behind the last `####`."""
    return {"answer": row["answer"].rpartition("####")[2]} if "answer" in row else {}


def _read_knights(row: dict) -> dict:
    """The quiz with the form of the answer, and everybody's role."""
    columns = {"quiz", "names", "solution"}
    if not columns <= row.keys():
        raise ValueError(f"needs the columns {sorted(columns)}; saw {sorted(row)}")
    told = ", ".join(
        f"{name} is a {'knight' if honest else 'knave'}"
        for name, honest in zip(row["names"], row["solution"], strict=True)
    )
    if "solution_text" in row and roles(row["solution_text"]) != roles(told):
        raise ValueError(f"`solution` says {told!r}, `solution_text` {row['solution_text']!r}")
    problem = f"{row['quiz']}\n{ROLES_INSTRUCTION}"
    return {"problem": problem, "answer": told, "level": len(row["names"])}


def _knights(people: int) -> Source:
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
_SPECS = {
    "aime24": _Spec(
        sources=(Source(hub_id="HuggingFaceH4/aime_2024", split="train", num_rows=30),),
        num_rows=30,
        integer=True,
    ),
    "aime25": _Spec(
        sources=tuple(
            Source(
                hub_id="opencompass/AIME2025", config=f"AIME2025-{part}", split="test", num_rows=15
            )
            for part in ("I", "II")
        ),
        num_rows=30,
        integer=True,
    ),
    "amc23": _Spec(
        sources=(Source(hub_id="math-ai/amc23", split="test", num_rows=40),),
        num_rows=40,
        integer=True,
    ),
    "math500": _Spec(sources=(_MATH500,), num_rows=500),
    "math500-l5": _Spec(
        sources=(_MATH500,), num_rows=134, keep=lambda row: str(row.get("level")) == "5"
    ),
    "minerva": _Spec(
        sources=(Source(hub_id="math-ai/minervamath", split="test", num_rows=272),), num_rows=272
    ),
    "gsm8k": _Spec(
        sources=(Source(hub_id="openai/gsm8k", config="main", split="test", num_rows=1319),),
        num_rows=1319,
        integer=True,
        read=_read_gsm8k,
    ),
    "knights-and-knaves": _Spec(
        sources=tuple(map(_knights, PEOPLE)), num_rows=700, read=_read_knights, checker=ROLES
    ),
} | {
    f"knights-and-knaves:{people}": _Spec(
        sources=(_knights(people),),
        num_rows=100,
        read=_read_knights,
        checker=ROLES,
        keep=lambda row, people=people: len(row.get("names", ())) == people,
    )
    for people in PEOPLE
}
_TOGETHER = {"aime": ("aime24", "aime25")}
_GYM = "reasoning-gym:"
NAMES = (*_SPECS, *_TOGETHER, "arithmetic", f"{_GYM}TASK")


def load_benchmark(name: str, path: str | Path | None = None) -> Benchmark:
    """A benchmark, its rows counted.

    Args:
        name: one of `NAMES`, TASK being any generator of reasoning-gym; or, with `path`, a name for
            a file of your own with the columns `problem` (or `question`) and `answer`.
        path: a local copy (.jsonl, .json, .parquet; no network is used), or a folder that holds it
            as NAME.jsonl and so on; parts of a benchmark (`aime`) are looked up there by their own
            names.

    Raises:
        ValueError: an unknown name; a number of rows that is not the benchmark's; a row without
            problem or answer, or with an answer that is not an integer where all must be; or see
            `sources.read_source`.
    """
    if (
        path is not None
        and not Path(path).is_dir()
        and (name == "arithmetic" or name.startswith(_GYM))
    ):
        raise ValueError(
            f"{name} is made by a package and read from no file; got {path}; give the file "
            f"another name"
        )
    if name == "arithmetic":
        rows = arithmetic.problems("test")
        return Benchmark(name=name, rows=rows, provenance=[{"split": "test", "rows": len(rows)}])
    if name.startswith(_GYM):
        return _from_reasoning_gym(name)
    if name in _TOGETHER and (path is None or Path(path).is_dir()):
        parts = [load_benchmark(part, path) for part in _TOGETHER[name]]
        rows = [row for part in parts for row in part.rows]
        provenance = [source for part in parts for source in part.provenance]
        return Benchmark(name=name, rows=rows, provenance=provenance)
    if name in _TOGETHER:
        spec = _Spec(sources=(), num_rows=60, integer=True)
    elif name in _SPECS:
        spec = _SPECS[name]
    elif path is None:
        raise ValueError(
            f"a benchmark is one of {', '.join(NAMES)}, or NAME=FILE for a file of your own; got "
            f"{name!r}"
        )
    else:
        spec = None
    read = _read_parts(name, spec, path)
    rows = [
        _row(name, spec, row, source, number)
        for number, (row, source) in enumerate((r, s) for part, s, _ in read for r in part)
        if spec is None or spec.keep(row)
    ]
    if spec is not None and len(rows) != spec.num_rows:
        raise ValueError(
            f"{name} must have {spec.num_rows} problems; got {len(rows)} from "
            f"{path or 'the hub'}; give the whole file, or "
            "another name with it if it is a file of your own"
        )
    repeated = len(rows) - len({row["id"] for row in rows})
    if repeated or not rows:
        raise ValueError(
            f"{name} must have rows with ids of their own; {len(rows)} rows, {repeated} ids repeat"
        )
    provenance = [provenance for _, _, provenance in read]
    return Benchmark(
        name=name, rows=rows, provenance=provenance, checker=spec.checker if spec else MATH
    )


def _read_parts(
    name: str, spec: _Spec | None, path: str | Path | None
) -> list[tuple[list[dict], str, dict]]:
    """Rows, name of the source, and provenance, for each part of the benchmark."""
    if path is None:
        parts = [(source.hub_id, *read_source(source)) for source in spec.sources]
        return [(rows, hub_id, provenance) for hub_id, rows, provenance in parts]
    path = Path(path)
    if path.is_dir():
        found = [path / f"{name}{suffix}" for suffix in SUFFIXES]
        if not any(file.is_file() for file in found):
            raise ValueError(
                f"{name} must be in {path} as one of {', '.join(file.name for file in found)}; "
                f"there is none; put it there"
            )
        path = next(file for file in found if file.is_file())
    rows, provenance = read_source(Source(hub_id="", split=""), path)
    return [(rows, path.name, provenance)]


def _row(name: str, spec: _Spec | None, row: dict, source: str, number: int) -> dict:
    """One row in our form; columns are found by name."""
    try:
        row = row | (spec.read(row) if spec else {})
        problem = row.get("problem") or row.get("question")
        answer = row.get("answer")
        if answer is None and "solution" in row:
            answer = extract_answer(str(row["solution"]), boxed=True)
        if (
            not isinstance(problem, str)
            or not problem.strip()
            or answer is None
            or not str(answer).strip()
        ):
            raise ValueError(
                "needs text in `problem` or `question`, and in `answer` or a box in `solution`; "
                f"saw the columns {sorted(row)}"
            )
        answer = str(answer).strip()
        if spec and spec.integer:
            answer = _integer(answer)
    except ValueError as error:
        raise ValueError(f"row {number} of {name} ({source}) {error}; repair the file") from error
    own = row.get("unique_id") or row.get("id")
    result = {
        "id": f"{name}/{number if own is None else own}",
        "problem": problem,
        "answer": answer,
        "source": source,
    }
    return result | ({} if row.get("level") is None else {"level": row["level"]})


def _integer(answer: str) -> str:
    """An integer however it is written ("025", "27.0", "1,000"), as Python writes it."""
    value = plain_number(answer)
    if value is None or value.denominator != 1:
        raise ValueError(f"must have an integer as its answer; got {answer!r}")
    return str(value)


def _from_reasoning_gym(name: str) -> Benchmark:
    """A fixed number of items of one generator; the same seed gives the same items."""
    task, size, seed = name.removeprefix(_GYM), REASONING_GYM_ITEMS, REASONING_GYM_SEED
    version = package_version("reasoning-gym")
    if version is None:
        raise ValueError(
            f"{name} needs the package reasoning-gym; it is not installed; pip install "
            f"reasoning-gym==0.1.25"
        )
    import reasoning_gym

    try:
        data = reasoning_gym.create_dataset(task, size=size, seed=seed)
    except ValueError as error:
        raise ValueError(
            f"{task!r} must be a generator of reasoning-gym {version}; {error}"
        ) from error
    rows = []
    for index, item in enumerate(data):
        if not item["answer"]:
            raise ValueError(
                f"{name} has items without an answer, so nothing can be graded; take another task"
            )
        rows.append(
            {
                "id": f"{name}/{index}",
                "problem": item["question"],
                "answer": item["answer"],
                "source": f"reasoning-gym {version}",
                "gold": reasoning_gym_gold(task, size, seed, index, item["answer"]),
            }
        )
    provenance = [{"package": f"reasoning-gym {version}", "task": task, "seed": seed, "rows": size}]
    return Benchmark(name=name, rows=rows, provenance=provenance, checker=REASONING_GYM)


def check_golds(benchmark: Benchmark, grader: Grader) -> None:
    """Checks every gold answer, before anything is drawn.

    Raises:
        ValueError: naming those that are not correct against themselves.
    """
    rows = benchmark.rows
    golds = [row.get("gold", row["answer"]) for row in rows]
    grades = own_grades(grader, [row["answer"] for row in rows], golds)
    bad = [row for row, grade in zip(rows, grades, strict=True) if grade is not Grade.CORRECT]
    if bad:
        shown = "; ".join(f"{row['id']}: {row['answer']!r:.80}" for row in bad[:5])
        raise ValueError(
            f"every gold answer of {benchmark.name} must be correct against itself; {len(bad)} "
            f"of {len(rows)} are not: {shown}; repair these rows, or leave them out"
        )
