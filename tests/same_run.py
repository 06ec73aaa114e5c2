"""Whether two run folders hold the same, to the last bit.

    python tests/same_run.py runs/before runs/after

Compares weights, completions, metrics, records and reports file by file. Seconds, dates, commit,
environment and folders' own paths are left out. Prints what differs, and exits with 1 if anything
does.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHANGING = frozenset({
    "seconds", "step_time", "run", "seconds_this_time", "environment", "model_path", "date",
    "eval/seconds", "train_runtime", "train_samples_per_second", "train_steps_per_second",
})  # fmt: skip
LEFT_OUT = ("training_args.bin",)
PATHS = ("base_model_name_or_path", "README.md")  # of PEFT; they name the model's folder


def timeless_files(out: Path) -> dict[str, Any]:
    """The content of every file below `out` by its relative path, without what changes."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".json":
            found[name] = steady(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = [steady(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == "training.csv":
            with path.open(newline="") as file:
                found[name] = [steady(row) for row in csv.DictReader(file)]
        elif path.is_file() and path.name not in LEFT_OUT and path.suffix != ".lock":
            found[name] = path.read_bytes()
    return found


def steady(value: Any) -> Any:
    if isinstance(value, dict):
        # PEFT keeps these in a set, whose order is another one in each process.
        value = {k: sorted(v) if k == "target_modules" else v for k, v in value.items()}
        return {k: steady(v) for k, v in value.items() if k not in CHANGING}
    if isinstance(value, list):
        return [steady(one) for one in value]
    return value


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """A line for every leaf in which two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            if key not in one or key not in other:
                side = "first" if key in one else "second"
                yield f"{where}.{key}: only in the {side}"
            else:
                yield from differences(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif json.dumps(one, default=repr) != json.dumps(other, default=repr):  # NaN equals itself
        yield f"{where}: {_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    return f"{len(value):,} bytes" if isinstance(value, bytes) else f"{value!r:.80}"


def main(folders: list[str]) -> int:
    one, other = (timeless_files(Path(folder)) for folder in folders)
    lines: list[str] = []
    for name in sorted(one | other):
        if name not in one or name not in other:
            lines.append(f"{name}: only in the {'first' if name in one else 'second'}")
            continue
        places: dict[str, list[str]] = {}  # one line for all rows of a file that differ in a column
        for line in differences(one[name], other[name], name):
            place = re.sub(r"\[\d+\]", "[]", line.split(": ")[0])
            if not place.endswith(PATHS):
                places.setdefault(place, []).append(line)
        for found in places.values():
            more = f" (and {len(found) - 1:,} more rows)" if len(found) > 1 else ""
            lines.append(found[0] + more)
    print("\n".join([*lines, f"{len(one | other)} files, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:3]))
