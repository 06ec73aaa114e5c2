"""Everything graded that lies in folders, graded again."""

from collections.abc import Sequence
from pathlib import Path

from sage_unsloth.evaluation.record_tables import sets_below
from sage_unsloth.sampling.record_files import settings_path
from sage_unsloth.sampling.regrading import Regraded, copy_set, regrade_rollouts, regrade_set
from sage_unsloth.training.stage import COMPLETIONS


def regrade(paths: Sequence[Path], to: Path | None = None) -> list[Regraded]:
    """Grades the record sets and rollouts at or below `paths` again.

    Args:
        paths: .jsonl files, or folders.
        to: a folder that gets graded copies, at the same places as below the one path that is
            given; None grades in place.

    Raises:
        ValueError: a path with nothing to grade; `to` with several paths or with a file; see
            `sampling.regrading`.
    """
    if to is not None and (len(paths) != 1 or not paths[0].is_dir()):
        raise ValueError(
            f"--to takes one folder, got {', '.join(map(str, paths))}. Grade them one by one"
        )
    files = [file for path in paths for file in _graded_files(path)]
    results = []
    for file in dict.fromkeys(file.resolve() for file in files):
        copy = None if to is None else to.resolve() / file.relative_to(paths[0].resolve())
        if not settings_path(file).is_file():
            if copy is not None:
                copy.parent.mkdir(parents=True, exist_ok=True)
            results.append(regrade_rollouts(file, copy=copy))
        else:
            if copy is not None:
                copy_set(file, copy)
            results.append(regrade_set(copy or file))
    return results


def _graded_files(path: Path) -> list[Path]:
    files = [path]
    if path.is_dir():
        files = [file for file in sets_below(path) if file.is_file()]
        files += sorted(path.rglob(COMPLETIONS))
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(
            f"regrade needs record sets (.jsonl with .settings.json) or {COMPLETIONS}, but {path} "
            "has none. Give the folder of evaluate, quickstart or train"
        )
    return files


def change_rows(results: Sequence[Regraded]) -> list[dict[str, str]]:
    """Rows for `figures.show_table`: what each file was graded by, and which grades changed."""
    return [
        {
            "file": f"{result.file.parent.name}/{result.file.name}",
            "graded again": f"{result.changes.total():,} of {result.total:,}",
            "graded before by": "; ".join(result.graders) or "today's grader",
            "right": f"{result.correct:,}",
            "changed": ", ".join(
                f"{count:,} {before} → {now}"
                for (before, now), count in result.changes.items()
                if before != now
            )
            or "none",
        }
        for result in results
    ]
