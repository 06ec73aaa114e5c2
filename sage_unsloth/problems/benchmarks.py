"""Benchmarks as rows of one form, from the hub or from local files, their counts checked.

A row: `id` (unique over all benchmarks), `problem`, `answer` (text), `source`, and where the
benchmark has them `level` and `gold`, what its checker compares with where that is not `answer`.
"""

from dataclasses import dataclass
from pathlib import Path

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.checkers import REASONING_GYM, reasoning_gym_gold
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader, own_grades
from sage_unsloth.grading.mathematics import MATH, plain_number
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.published import PUBLISHED, TOGETHER, Published
from sage_unsloth.problems.sources import SUFFIXES, Source, read_source
from sage_unsloth.runs.record import package_version

REASONING_GYM_ITEMS, REASONING_GYM_SEED = 100, 3407  # a training set from it needs another seed
_GYM = "reasoning-gym:"
NAMES = (*PUBLISHED, *TOGETHER, "arithmetic", f"{_GYM}TASK")


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


def load_benchmark(name: str, path: str | Path | None = None) -> Benchmark:
    """A benchmark, its rows counted.

    Args:
        name: one of `NAMES`, TASK being any generator of reasoning-gym; or, with `path`, a name for
            a file of your own with the columns `problem` (or `question`) and `answer`.
        path: a local copy (.jsonl, .json, .parquet; no network is used), its files in their order
            with commas between, or a folder that holds it as NAME.jsonl and so on; parts of a
            benchmark (`aime`) are looked up there by their own names.

    Raises:
        ValueError: an unknown name; a number of rows that is not the benchmark's; a row without
            problem or answer, or with an answer that is not an integer where all must be; or see
            `sources.read_source`.
    """
    if name == "arithmetic" or name.startswith(_GYM):
        if path is not None and not Path(path).is_dir():
            raise ValueError(
                f"{name} is made by a package and read from no file; got {path}; give the file "
                "another name"
            )
        return _from_arithmetic() if name == "arithmetic" else _from_reasoning_gym(name)
    if name in TOGETHER and (path is None or Path(path).is_dir()):
        parts = [load_benchmark(part, path) for part in TOGETHER[name]]
        rows = [row for part in parts for row in part.rows]
        provenance = [source for part in parts for source in part.provenance]
        return Benchmark(name=name, rows=rows, provenance=provenance)
    spec = _spec_of(name, path)
    parts = _read_parts(name, spec, path)
    numbered = enumerate((row, source) for rows, source, _ in parts for row in rows)
    rows = [
        _row(name, spec, row, source, number)
        for number, (row, source) in numbered
        if spec.keep(row)
    ]
    if spec.num_rows is not None and len(rows) != spec.num_rows:
        raise ValueError(
            f"{name} must have {spec.num_rows} problems; got {len(rows)} from {path or 'the hub'}; "
            "give the whole file, or another name with it if it is a file of your own"
        )
    repeated = len(rows) - len({row["id"] for row in rows})
    if repeated or not rows:
        raise ValueError(
            f"{name} must have rows with ids of their own; {len(rows)} rows, {repeated} ids "
            "repeat; repair the file"
        )
    provenance = [provenance for _, _, provenance in parts]
    return Benchmark(name=name, rows=rows, provenance=provenance, checker=spec.checker)


def _spec_of(name: str, path: str | Path | None) -> Published:
    """How the benchmark of that name is read, or a file of one's own."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    if name in TOGETHER:  # in one file
        parts = [PUBLISHED[part] for part in TOGETHER[name]]
        num_rows = sum(part.num_rows or 0 for part in parts)
        return Published(num_rows=num_rows, integer=all(part.integer for part in parts))
    if path is None:
        raise ValueError(
            f"a benchmark is one of {', '.join(NAMES)}, or NAME=FILE for a file of your own; got "
            f"{name!r}"
        )
    return Published()


def _read_parts(
    name: str, spec: Published, path: str | Path | None
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
                "there is none; put it there"
            )
        path = next(file for file in found if file.is_file())
    files = [path] if path.exists() else [Path(part) for part in str(path).split(",")]
    parts = [(file.name, *read_source(Source(hub_id="", split=""), file)) for file in files]
    return [(rows, file, provenance) for file, rows, provenance in parts]


def _row(name: str, spec: Published, row: dict, source: str, number: int) -> dict:
    """One row in our form; columns are found by name."""
    try:
        row = row | spec.read(row)
        problem = row.get("problem") or row.get("question")
        answer = row.get("answer")
        if answer is None and "solution" in row:
            answer = extract_answer(str(row["solution"]), boxed=True)
        asks = isinstance(problem, str) and problem.strip()
        if not asks or answer is None or not str(answer).strip():
            raise ValueError(
                "needs text in `problem` or `question`, and in `answer` or a box in `solution`; "
                f"saw the columns {sorted(row)}"
            )
        answer = str(answer).strip()
        if spec.integer:
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


def _from_arithmetic() -> Benchmark:
    rows = arithmetic.problems("test")
    provenance = [{"split": "test", "rows": len(rows)}]
    return Benchmark(name="arithmetic", rows=rows, provenance=provenance)


def _from_reasoning_gym(name: str) -> Benchmark:
    """A fixed number of items of one generator; the same seed gives the same items."""
    task, size, seed = name.removeprefix(_GYM), REASONING_GYM_ITEMS, REASONING_GYM_SEED
    version = package_version("reasoning-gym")
    if version is None:
        raise ValueError(
            f"{name} needs the package reasoning-gym; it is not installed; pip install "
            "reasoning-gym==0.1.25"
        )
    import reasoning_gym

    try:
        data = reasoning_gym.create_dataset(task, size=size, seed=seed)
    except ValueError as error:
        raise ValueError(
            f"{task!r} must be a generator of reasoning-gym {version}; {error}; its gallery has "
            "their names"
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
