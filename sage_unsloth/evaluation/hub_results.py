"""Results as the hub reads them: `.eval_results/*.yaml` and the `model-index` of a model card.

Both are written from what `report.json` holds, for one model of it. The hub lists a score of
`.eval_results` on the leaderboard of a data set, so one is written only where all problems are all
rows of one data set of the hub, with its own golds; the model-index, which stands in the model's
own card, has every benchmark.

Values are percent. https://huggingface.co/docs/hub/eval-results names the fields.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import write_text
from sage_unsloth.runs.text import file_name, printable

FOLDER = ".eval_results"


def model_rows(report: Mapping[str, Any], model: str | None) -> list[Mapping[str, Any]]:
    """The rows of the report's table that are of one model.

    Args:
        report: see `report.report_sets`.
        model: its name; None where the report has one only.

    Raises:
        ValueError: the report has no such model, or several and none is named.
    """
    names = list(dict.fromkeys(row["model"] for row in report["table"]))
    if model is None and len(names) == 1:
        model = names[0]
    if model not in names:
        raise ValueError(
            f"a model's results need its name in the report, one of {', '.join(names)}, got "
            f"{model!r}. Set --report-model"
        )
    return [row for row in report["table"] if row["model"] == model]


def named_model(report: Mapping[str, Any], expected: str | None) -> str | None:
    """Whose results a card is given: those of `wanted`, or of the report's only model.

    Returns:
        Its name; None where it has several and none is wanted, or is no report of `evaluate` or
        `compare` (the quickstart's).

    Raises:
        ValueError: the report has no such model.
    """
    names = {row["model"] for row in report.get("table", [])}
    if expected is None and len(names) != 1:
        return None
    return model_rows({"table": report.get("table", [])}, expected)[0]["model"]


def refusal_reason(row: Mapping[str, Any], sources: list[Mapping[str, Any]]) -> str | None:
    """Why a benchmark's score belongs on no leaderboard of the hub; None where it does."""
    if row.get("drawn_by"):
        return f"its samples are {row['drawn_by']}'s, which says no data set"
    read = [source for source in sources if "repairs" not in source]
    rows = sum(source.get("rows", 0) for source in read)
    count = f"{row['problems']:,} of {rows:,}" if rows else f"{row['problems']:,}"
    if len(sources) != 1 or not sources[0].get("hub_id"):
        names = [source.get("hub_id") or source.get("file") for source in sources]
        result = f", but from {', '.join(map(str, names))}" if any(names) else ""
        return (
            f"its problems ({count}) are not those of one data set of the hub{result}. Evaluate "
            "all of one, by its name on the hub: no local copy (NAME=FILE, --data), no repairs"
        )
    if rows != row["problems"]:
        return (
            f"its problems ({count}) are not all of {sources[0]['hub_id']}. Evaluate without "
            "--problems, on all rows of the data set"
        )
    return None


def eval_results(
    report: Mapping[str, Any], model: str | None = None, tasks: Mapping[str, str] | None = None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """pass@1 of one model as entries of `.eval_results`.

    Args:
        report: see `report.report_sets`.
        model: see `model_rows`.
        tasks: benchmark -> `task_id`, as the data set's own `eval.yaml` names it; None takes the
            benchmark's name.

    Returns:
        benchmark -> the entries of its file; and benchmark -> why it has none.

    Raises:
        ValueError: see `model_rows`; or `tasks` names a benchmark that the report has not.
    """
    rows, tasks = model_rows(report, model), dict(tasks or {})
    unknown = tasks.keys() - {row["benchmark"] for row in rows}
    if unknown:
        raise ValueError(
            "--task must name benchmarks of the report, "
            f"{', '.join(row['benchmark'] for row in rows)}, got {', '.join(sorted(unknown))}"
        )
    entries, reasons = {}, {}
    for row in rows:
        benchmark = row["benchmark"]
        sources = report.get("datasets", {}).get(benchmark, [])
        reason = refusal_reason(row, sources)
        if reason is not None:
            reasons[benchmark] = reason
            continue
        (source,) = sources
        dataset = {"id": source["hub_id"], "task_id": tasks.get(benchmark, benchmark)}
        if source.get("revision"):
            dataset["revision"] = source["revision"]
        estimate = report["pass_at_k"][benchmark][row["model"]]["1"]
        entries[benchmark] = [
            {
                "dataset": dataset,
                "value": _percent(estimate["mean"]),
                "date": report["environment"]["date"],
                "notes": f"pass@1, {_conditions(row, report)}, {_interval(estimate)}; sage_unsloth",
            }
        ]
    return entries, reasons


def model_index(
    report: Mapping[str, Any], name: str, model: str | None = None
) -> list[dict[str, Any]]:
    """pass@1 and pass@n of one model on every benchmark, as the card's `model-index`.

    Args:
        report: see `report.report_sets`.
        name: of the model on the hub.
        model: see `model_rows`.

    Raises:
        ValueError: see `model_rows`.
    """
    results = []
    for row in model_rows(report, model):
        sources = report.get("datasets", {}).get(row["benchmark"], [])
        source = sources[0] if len(sources) == 1 else {}
        dataset = {"name": row["benchmark"], "type": source.get("hub_id") or row["benchmark"]}
        dataset |= {k: source[k] for k in ("config", "split", "revision") if source.get(k)}
        curve = report["pass_at_k"][row["benchmark"]][row["model"]]
        drawn = _conditions(row, report)
        metrics = [
            {
                "type": f"pass@{k}",
                "name": f"pass@{k}, percent, {drawn}, {_interval(curve[str(k)])}",
                "value": _percent(curve[str(k)]["mean"]),
            }
            for k in dict.fromkeys((1, row["samples"]))
        ]
        task = {"type": "text-generation", "name": "Text Generation"}
        results.append({"task": task, "dataset": dataset, "metrics": metrics})
    return _printable([{"name": name, "results": results}])


def write_eval_results(folder: Path, entries: Mapping[str, list[dict[str, Any]]]) -> list[Path]:
    """The entries as files of a model's folder, one for each benchmark."""
    files = []
    for benchmark, result in entries.items():
        path = folder / FOLDER / f"{file_name(benchmark)}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, yaml_text(result))
        files.append(path)
    return files


def yaml_text(data: Any) -> str:
    """YAML in which every text is harmless: quoted where it needs to be, and `printable`."""
    from huggingface_hub.utils import yaml_dump

    return yaml_dump(_printable(data), sort_keys=False, width=100)


def _printable(data: Any) -> Any:
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {_printable(key): _printable(value) for key, value in data.items()}
    return [_printable(value) for value in data] if isinstance(data, list) else data


def _percent(share: float) -> float:
    return round(100 * share, 2)


def _interval(estimate: Mapping[str, Any]) -> str:
    if estimate["low"] is None:
        return "no interval"
    return f"95 % [{_percent(estimate['low']):g}, {_percent(estimate['high']):g}]"


def _conditions(row: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """How many samples, and how they were drawn."""
    seeds = f" of {row['seeds']} training seeds" if row["seeds"] > 1 else ""
    temperature = report["sampling"].get("temperature")
    drawn = "" if temperature is None else f" at temperature {temperature:g}"
    return f"mean over {row['samples']} samples of each problem{seeds}{drawn}"
