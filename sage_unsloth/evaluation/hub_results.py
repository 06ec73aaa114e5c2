"""Results in the hub's formats: `.eval_results/*.yaml` and the `model-index` of a model card.

Both come from `report.json`, for one model of it. The hub lists a score of `.eval_results` on the
leaderboard of a data set, so one is written only if all problems are all rows of one hub data set,
with its own golds; the model-index has every benchmark.

Values are percent. Fields: https://huggingface.co/docs/hub/eval-results
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_unsloth.runs.files import write_text
from sage_unsloth.runs.text import file_name, printable

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, EvalResultEntry

HUB_FOLDER = ".eval_results"


def model_rows(report: Mapping[str, Any], model: str | None) -> list[Mapping[str, Any]]:
    """The report's table rows of one model.

    Args:
        report: see `report.report_sets`.
        model: its name; None if the report has only one.

    Raises:
        ValueError: no such model, or several and no name.
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
    """The name of the model whose results a card gets: `expected`, or the report's only model.

    None if it has several and no name is given, or it is not a report of `evaluate` or `compare`.

    Raises:
        ValueError: the report has no such model.
    """
    names = {row["model"] for row in report.get("table", [])}
    if expected is None and len(names) != 1:
        return None
    return model_rows({"table": report.get("table", [])}, expected)[0]["model"]


def _is_whole(row: Mapping[str, Any], sources: list[Mapping[str, Any]]) -> bool:
    """Whether the problems are all rows of one data set of the hub."""
    return (
        len(sources) == 1
        and bool(sources[0].get("hub_id"))
        and sources[0].get("rows") == row["problems"]
    )


def eval_results(
    report: Mapping[str, Any], model: str | None = None
) -> dict[str, "EvalResultEntry"]:
    """benchmark -> pass@1 of one model as an entry of `.eval_results`, if the hub can list it."""
    from huggingface_hub import EvalResultEntry

    entries = {}
    for row in model_rows(report, model):
        benchmark = row["benchmark"]
        sources = report.get("datasets", {}).get(benchmark, [])
        if _is_whole(row, sources):
            estimate = report["pass_at_k"][benchmark][row["model"]]["1"]
            entries[benchmark] = EvalResultEntry(
                dataset_id=sources[0]["hub_id"],
                task_id=benchmark,
                dataset_revision=sources[0].get("revision"),
                value=_percent(estimate["mean"]),
                date=report["environment"]["date"],
                notes=f"pass@1, {_conditions(row, report)}, {_interval(estimate)}; sage_unsloth",
            )
    return entries


def card_results(report: Mapping[str, Any], model: str | None = None) -> list["EvalResult"]:
    """pass@1 and pass@n of one model on every benchmark, for the card's `model-index`."""
    from huggingface_hub import EvalResult

    results = []
    for row in model_rows(report, model):
        sources = report.get("datasets", {}).get(row["benchmark"], [])
        source = sources[0] if len(sources) == 1 else {}
        curve = report["pass_at_k"][row["benchmark"]][row["model"]]
        for k in dict.fromkeys((1, row["samples"])):
            estimate = curve[str(k)]
            drawn = f"{_conditions(row, report)}, {_interval(estimate)}"
            results.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="Text Generation",
                    dataset_name=row["benchmark"],
                    dataset_type=source.get("hub_id") or row["benchmark"],
                    dataset_config=source.get("config"),
                    dataset_split=source.get("split"),
                    dataset_revision=source.get("revision"),
                    metric_type=f"pass@{k}",
                    metric_name=f"pass@{k}, percent, {drawn}",
                    metric_value=_percent(estimate["mean"]),
                )
            )
    return results


def write_eval_results(folder: Path, entries: Mapping[str, "EvalResultEntry"]) -> None:
    """Writes one file for each benchmark into a model folder."""
    from huggingface_hub import eval_result_entries_to_yaml

    for benchmark, entry in entries.items():
        path = folder / HUB_FOLDER / f"{file_name(benchmark)}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, yaml_text(eval_result_entries_to_yaml([entry])))


def yaml_text(data: Any) -> str:
    """YAML with all texts quoted where needed, and `printable`."""
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
    """The number of samples and the sampling settings."""
    seeds = f" of {row['seeds']} training seeds" if row["seeds"] > 1 else ""
    temperature = report["sampling"].get("temperature")
    drawn = "" if temperature is None else f" at temperature {temperature:g}"
    return f"mean over {row['samples']} samples of each problem{seeds}{drawn}"
