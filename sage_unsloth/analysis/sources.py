"""Finds RL runs, record sets, and the texts of their problems in folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.record_tables import read_sets, read_texts, refuse_ungraded, sets_below
from sage_unsloth.models.weights import model_identity
from sage_unsloth.problems.benchmarks import Benchmark, load_benchmark
from sage_unsloth.sampling.record_files import read_settings
from sage_unsloth.training.stage import METRICS, read_metrics


@dataclass(frozen=True)
class Sources:
    """The content of the given folders.

    Attributes:
        runs: name of an RL run -> its folder.
        samples: benchmark -> model -> records.
        settings: (benchmark, model) -> the record set's settings.
        texts: benchmark -> problem -> text, if an evaluation stored them.
    """

    runs: dict[str, Path] = field(default_factory=dict)
    samples: dict[str, dict[str, list[dict]]] = field(default_factory=dict)
    settings: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    texts: dict[str, dict[str, str]] = field(default_factory=dict)


def find_sources(paths: Sequence[str | Path]) -> Sources:
    """RL runs and record sets in the folders, recursively.

    An RL run is a folder with `metrics.jsonl` whose steps have a reward. Record sets inside a
    training run's folder (preflight, held-out rows of SFT) are not evaluations and are ignored. A
    run gets the name under which its adapter or model was evaluated, by the digest of its weights;
    if record sets have no digest (the quickstart's), by the folder's name, ignoring case. Sets of
    one model on one benchmark are training seeds, and get numbered names.

    Raises:
        ValueError: a path with neither; two runs of one name; ungraded completions; or see
            `record_tables.read_sets`.
    """
    folders, files = [], []
    for path in map(Path, paths):
        runs, sets = _runs_and_sets(path)
        runs = [run for run in runs if any("reward" in row for row in read_metrics(run))]
        if not (runs or any(file.is_file() for file in sets)):
            raise ValueError(
                f"an analysis needs RL runs ({METRICS}) or record sets, but {path} has none. "
                "Give the folder of a quickstart, of train or of evaluate"
            )
        folders += runs
        files += sets
    sources = Sources()
    for file in files:
        if texts := read_texts(file):
            benchmark = read_settings(file)["settings"]["benchmark"]
            sources.texts.setdefault(benchmark, {}).update(texts)
    for settings, records in read_sets(files):
        model, benchmark = settings["model"], settings["benchmark"]
        refuse_ungraded(records, model, benchmark)
        models = sources.samples.setdefault(benchmark, {})
        taken = sum(name == model or name.startswith(f"{model} #") for name in models)
        name = f"{model} #{taken + 1}" if taken else model
        models[name] = records
        sources.settings[benchmark, name] = settings
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        name = _evaluated_as(folder, sources.settings) or folder.name
        if name in sources.runs:
            raise ValueError(
                f"training runs must have different names, but {sources.runs[name]} and {folder} "
                "have the same. Rename a folder"
            )
        sources.runs[name] = folder
    for benchmark, models in sources.samples.items():
        # What was trained comes after what training began with, as in the quickstart's figures.
        sources.samples[benchmark] = dict(
            sorted(models.items(), key=lambda item: item[0] in sources.runs)
        )
    return sources


def _runs_and_sets(path: Path) -> tuple[list[Path], list[Path]]:
    """Folders of training runs at or below a path, and the record sets outside of them."""
    if not path.is_dir():
        return [], [path]
    runs = sorted(file.parent for file in path.rglob(METRICS))
    sets = [s for s in sets_below(path) if not {s.parent, s.parent.parent} & set(runs)]
    return runs, sets


def _evaluated_as(folder: Path, settings: Mapping[tuple[str, str], dict]) -> str | None:
    """The name of the evaluated model that belongs to a run, if any."""
    trained = next(
        (folder / part for part in ("adapter", "model") if (folder / part).is_dir()), None
    )
    if trained is not None:
        digest = model_identity(trained)["weights"]
        for (_, name), result in settings.items():
            if digest in (result.get("adapter"), result.get("weights")):
                return name
    for (_, name), result in settings.items():
        if name.casefold() == folder.name.casefold() and result.get("weights") is None:
            return name
    return None


def problem_texts(
    benchmark: str,
    sources: Sources,
    data: str | Path | None = None,
    known: Benchmark | None = None,
) -> dict[str, str]:
    """id -> text of the problems in the records: stored by `evaluate`, else from the benchmark.

    Args:
        data: folder of local copies; None uses the hub for benchmarks that are not embedded.
        known: the benchmark, if already loaded.

    Raises:
        ValueError: the benchmark's answer to a problem differs from the records'.
    """
    from sage_unsloth.sampling.record_sets import row_gold

    samples, texts = sources.samples[benchmark], sources.texts.get(benchmark, {})
    if {record["problem_id"] for records in samples.values() for record in records} <= {*texts}:
        return dict(texts)
    rows = {row["id"]: row for row in (known or load_benchmark(benchmark, data)).rows}
    for model, records in samples.items():
        for record in records:
            row = rows.get(record["problem_id"])
            if row is None or row_gold(row) != record["gold"]:
                at_hand = "no such problem" if row is None else f"the answer {row_gold(row)!r:.60}"
                raise ValueError(
                    f"the benchmark must be the one that was sampled, but {model} has "
                    f"{record['problem_id']} with the answer {record['gold']!r:.60}, and "
                    f"{benchmark} here has {at_hand}. Name the file that was evaluated "
                    "(--benchmarks NAME=FILE)"
                )
    return {name: row["problem"] for name, row in rows.items()}
