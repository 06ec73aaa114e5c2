"""Benchmarks as rows of one form, from the hub or from local files, with checked counts.

A row: `id` (unique over all benchmarks), `problem`, `answer` (text), `source`, and if the benchmark
has them `level` and `gold`, which the checker then compares with instead of `answer`.

No benchmark is refused for its golds: those that a checker cannot read are compared as text,
counted and listed (`check_golds`).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.checkers import REASONING_GYM
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH, only_its_text, plain_number
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.gym import GYM_PREFIX, REASONING_GYM_ITEMS, REASONING_GYM_SEED, gym_rows
from sage_unsloth.problems.own_data import cell_text, find_source, read_columns, read_raw
from sage_unsloth.problems.published import PUBLISHED, TOGETHER, Published
from sage_unsloth.problems.sources import SUFFIXES, Source, read_source

NAMES = (*PUBLISHED, *TOGETHER, "arithmetic", f"{GYM_PREFIX}TASK")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Problems to evaluate on.

    Attributes:
        name: as given to `load_benchmark`.
        provenance: hub id and revision, or file and digest.
        not_integers: ids of rows whose gold is not an integer, in a benchmark of integers.
    """

    name: str
    rows: list[dict]
    provenance: list[dict]
    checker: Checker = MATH
    not_integers: list[str] = field(default_factory=list)


def load_benchmark(
    name: str,
    path: str | Path | None = None,
    columns: Columns | None = None,
) -> Benchmark:
    """A benchmark with a checked number of rows.

    Args:
        name: one of `NAMES`, where TASK is any generator of reasoning-gym; or, with `path`, a name
            for custom problems with the columns `problem` (or `question`, or `messages`) and
            `answer`, or those in `columns`.
        path: a local copy (.jsonl, .json, .parquet, .csv; no network is used), several files
            separated by commas, or a folder with NAME.jsonl and so on; parts of a benchmark
            (`aime`) have their own names there. Custom problems may also be on the hub: OWNER/NAME
            or OWNER/NAME:CONFIG.

    Raises:
        ValueError: an unknown name; a wrong number of rows; a row without problem or answer; or see
            `sources.read_source`.
    """
    if name == "arithmetic" or name.startswith(GYM_PREFIX):
        if path is not None and not Path(path).is_dir():
            raise ValueError(f"{name} is made by a package and read from no file, got {path}")
        return _from_arithmetic() if name == "arithmetic" else _from_reasoning_gym(name)
    if name in TOGETHER and (path is None or Path(path).is_dir()):
        parts = [load_benchmark(part, path) for part in TOGETHER[name]]
        rows = [row for part in parts for row in part.rows]
        provenance = [source for part in parts for source in part.provenance]
        odd = [result for part in parts for result in part.not_integers]
        return Benchmark(name=name, rows=rows, provenance=provenance, not_integers=odd)
    spec = _spec_of(name, path)
    own = _own_parts(name, path, columns or Columns())
    parts = own or _read_parts(name, spec, path)
    numbered = enumerate((row, source) for rows, source, _ in parts for row in rows)
    rows = [
        ({k: v for k, v in row.items() if v is not None} if own else {})
        | _row(name, spec, row, source, number)
        for number, (row, source) in numbered
        if spec.keep(row)
    ]
    if spec.num_rows is not None and len(rows) != spec.num_rows:
        raise ValueError(
            f"{name} must have {spec.num_rows} problems, got {len(rows)} from {path or 'the hub'}. "
            "Give the whole file, or name your own file differently"
        )
    repeated = len(rows) - len({row["id"] for row in rows})
    if repeated or not rows:
        raise ValueError(
            f"{name} must have a different id for each row, but {repeated} of {len(rows)} repeat"
        )
    provenance = [provenance for _, _, provenance in parts]
    benchmark = Benchmark(name=name, rows=rows, provenance=provenance, checker=spec.checker)
    if not spec.integer:
        return benchmark
    odd = [row["id"] for row in benchmark.rows if not _is_integer(row["answer"])]
    return replace(benchmark, not_integers=odd)


def _spec_of(name: str, path: str | Path | None) -> Published:
    """How the benchmark, or a custom file, is read."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    if name in TOGETHER:  # in one file
        parts = [PUBLISHED[part] for part in TOGETHER[name]]
        num_rows = sum(part.num_rows or 0 for part in parts)
        return Published(num_rows=num_rows, integer=all(part.integer for part in parts))
    if path is None:
        raise ValueError(
            f"a benchmark is one of {', '.join(NAMES)}, or NAME=FILE for a file of your own, got "
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
        results = [path / f"{name}{suffix}" for suffix in SUFFIXES]
        if not any(file.is_file() for file in results):
            raise ValueError(
                f"{name} must be in {path} as one of {', '.join(file.name for file in results)}, "
                "but there is none"
            )
        path = next(file for file in results if file.is_file())
    files = [path] if path.exists() else [Path(part) for part in str(path).split(",")]
    parts = [(file.name, *read_source(Source(hub_id="", split=""), file)) for file in files]
    return [(rows, file, provenance) for file, rows, provenance in parts]


def _own_parts(
    name: str, path: str | Path | None, columns: Columns
) -> list[tuple[list[dict], str, dict]] | None:
    """Custom problems, all with an answer; None if `_row` finds their columns."""
    if path is None or name in (*PUBLISHED, *TOGETHER) or Path(path).is_dir():
        return None
    parts = []
    for data in str(path).split(","):
        raw, provenance = read_raw(data, columns, split="test")
        is_file = find_source(data, "test")[1] is not None
        if is_file and not columns and {"problem", "question"} & raw[0].keys():
            return None
        result = read_columns(raw, columns, ("answer",), data)
        for rule, good in result.filters.items():
            if not all(good):
                raise ValueError(
                    f"every problem of an evaluation must have an answer, but '{rule}' gives none "
                    f"for {good.count(False):,} of {len(good):,} rows of {data}, row "
                    f"{good.index(False)} the first. Correct --answer-pattern, or drop these rows"
                )
        rows = [
            {"id": own.get("unique_id") or own.get("id"), "level": own.get("level")} | row
            for row, own in zip(result.rows, raw, strict=True)
        ]
        parts.append((rows, Path(data).name, provenance))
    return parts


def _row(name: str, spec: Published, row: dict, source: str, number: int) -> dict:
    """One row in our form; columns are recognised by name."""
    try:
        row = row | spec.read(row)
        problem = row.get("problem") or row.get("question")
        answer = row.get("answer")
        if answer is None and "solution" in row:
            answer = extract_answer(str(row["solution"]), boxed=True)
        asks = isinstance(problem, str) and problem.strip()
        if not asks or answer is None or not str(answer).strip():
            raise ValueError(
                "needs text in `problem` or `question`, and in `answer` or a box in `solution`, "
                f"but saw the columns {sorted(row)}"
            )
        answer = cell_text(answer)
        if spec.integer and _is_integer(answer):  # "025", "27.0", "1,000", as Python writes it
            answer = str(plain_number(answer))
    except ValueError as error:
        raise ValueError(f"row {number} of {name} ({source}) {error}") from error
    own = row.get("unique_id") or row.get("id")
    result = {
        "id": f"{name}/{number if own is None else own}",
        "problem": problem,
        "answer": answer,
        "source": source,
    }
    return result | ({} if row.get("level") is None else {"level": row["level"]})


def _is_integer(answer: str) -> bool:
    value = plain_number(answer)
    return value is not None and value.denominator == 1


def _from_arithmetic() -> Benchmark:
    rows = arithmetic.problems("test")
    provenance = [{"split": "test", "rows": len(rows)}]
    return Benchmark(name="arithmetic", rows=rows, provenance=provenance)


def _from_reasoning_gym(name: str) -> Benchmark:
    """A fixed number of items of one generator; the same seed gives the same items."""
    rows, provenance = gym_rows(name, REASONING_GYM_ITEMS, REASONING_GYM_SEED)
    return Benchmark(name=name, rows=rows, provenance=[provenance], checker=REASONING_GYM)


def _check_gold(row: dict, benchmark: Benchmark) -> None:
    try:
        benchmark.checker.check_gold(row.get("gold", row["answer"]))
    except ValueError as error:
        raise ValueError(f"{row['id']}: {error}") from None


def check_golds(benchmark: Benchmark, grader: Grader) -> list[dict]:
    """The golds that an answer can hardly match, found before sampling; none is an error.

    Raises:
        ValueError: a gold that the checker cannot read, if golds are not answers (a pattern, a
            program's tests).

    Returns:
        `benchmark`, `id`, `gold` and `why` of each: "no integer", in a benchmark of integers;
        "compared as text", if only its own text is correct; "not right for itself", for other
        checkers.
    """
    rows = benchmark.rows
    if not benchmark.checker.gold_is_answer:
        for row in rows:
            _check_gold(row, benchmark)
        rows = [row for row in rows if "gold" in row]
    golds = [row.get("gold", row["answer"]) for row in rows]
    verdicts = grader.judge_answers([row["answer"] for row in rows], golds)
    listed = []
    for row, verdict in zip(rows, verdicts, strict=True):
        why = None
        if verdict.grade is not Grade.CORRECT:
            why = "not right for itself"
        elif benchmark.checker.name != "text" and only_its_text(row["answer"], verdict):
            why = "compared as text"
        elif row["id"] in benchmark.not_integers:
            why = "no integer"
        if why is not None:
            result = {"benchmark": benchmark.name, "id": row["id"], "gold": row["answer"]}
            listed.append(result | {"why": why})
    return listed
