"""The model card of an export: model, training, results, an example."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.hub_results import card_results, yaml_text
from sage_unsloth.export.card_example import example
from sage_unsloth.export.data_card import data_rows, hub_data
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat, recorded_format
from sage_unsloth.runs.settings import EVALUATION, SAVING
from sage_unsloth.runs.text import escape_markdown, printable
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_config import SftConfig

UNUSED = (EVALUATION, SAVING)
"""Groups of settings that do not affect weights."""
CARD_METRICS = (
    "reward",
    "kl/ref_k3",
    "kl/anchor_k3",
    "kl",
    "sage/entropy",
    "sage/guide_mean",
    "completions/mean_length",
    "completions/clipped_ratio",
    "frac_reward_zero_std",
    "advantages/dead_groups",
    "grad_norm",
    "loss",
)
OPEN_LICENSES = ("apache-2.0", "mit")
KINDS = {
    "adapter": ("LoRA adapter", "peft"),
    "merged": ("model", "transformers"),
    "gguf": ("GGUF model", None),
}


def final_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each known metric averaged over the last tenth of the steps that have it."""
    averages = {}
    for name in CARD_METRICS:
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        last = values[-max(1, len(values) // 10) :]
        if last:
            averages[name] = sum(last) / len(last)
    return averages


def model_card(
    *,
    kind: str,
    name: str,
    record: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    base: str,
    license: str | None,
    loads_on: str | None = None,
    loads_from: str | None = None,
    report: Mapping[str, Any] | None = None,
    report_model: str | None = None,
    checks: Mapping[str, Any] | None = None,
) -> str:
    """The card, as Markdown with the hub's YAML header.

    Args:
        kind: "adapter", "merged" or "gguf".
        record: the run's `run.json`.
        metrics: rows of `metrics.jsonl`.
        base: hub id or name of the first model of the chain of runs.
        license: of the base, as the hub spells it, or None.
        loads_on: hub id of an adapter's base, or None.
        loads_from: hub id or folder in the example; None takes the name.
        report: of an evaluation: its `pass_at_k` (problems -> model -> k -> mean, low, high)
            becomes a table.
        report_model: whose results are in the header's `model-index`; None writes none.
        checks: results of the export's checks.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    settings = record["settings"]
    noun, library = KINDS[kind]
    rl = settings.get("stage") == "rlvr"
    how = "reinforcement learning with verifiable rewards" if rl else "supervised fine-tuning"
    below = Path(record.get("model_path", ""))
    before = ""
    if rl and below.name == "model":  # the merged result of an earlier run
        before = f" after an earlier stage (the run {_code(below.parent.name)})"
    results = []
    if report is not None and report_model is not None:
        results = card_results(report, report_model)
    parts = [
        _header(base, license, library, rl, name, results, hub_data(record.get("data", {}))),
        f"# {escape_markdown(name)}\n\nA {noun}, trained from {_code(base)} by {how}{before} with "
        "[sage_unsloth](https://github.com/sage-unsloth/sage_unsloth): GRPO in Unsloth, with or "
        "without the guide of [SAGE](https://arxiv.org/abs/2605.18864) on its KL anchor.",
        "## How to ask it\n\n"
        + example(
            kind,
            loads_from or name,
            loads_on,
            settings.get("max_completion_length", 512),
            settings.get("load_in_4bit", False),
        ),
        _prompt_text(recorded_format(settings)),
        "## Trained with\n\n" + _table(("setting", "value"), _settings(settings)),
    ]
    if rl:
        parts.append("## Rewarded for\n\n" + _table(("reward", "value"), _reward_rows(settings)))
    if data := data_rows(record.get("data", {})):
        parts.append("## Trained on\n\n" + _table(("data", "value"), data))
    averages = final_metrics(metrics)
    if averages:
        steps = max(row.get("step", 0) for row in metrics)
        parts.append(
            f"## At the end of training\n\nMeans over the last tenth of {steps} steps, on training "
            "problems.\n\n"
            + _table(
                ("metric", "value"), [(key, f"{value:.4g}") for key, value in averages.items()]
            )
        )
    if report is not None:
        parts.append("## pass@k\n\nWith 95 % intervals.\n\n" + _pass_at_k(report["pass_at_k"]))
    if checks:
        parts.append("## Checked at export\n\n" + _table(("check", "found"), checks.items()))
    parts += [
        "## Versions\n\n" + _table(("package", "version"), _versions(record["environment"])),
        "## Licence\n\n" + _license_text(base, license),
    ]
    return "\n\n".join(parts) + "\n"


def _reward_rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The verifier and each reward with its weight, from `run.json`."""
    rows = [("verifier", str(settings.get("verifier", MATH.label)))]
    for reward in settings.get("rewards") or [{"name": "answer", "weight": 1.0}]:
        source = f", {reward['function']}" if "function" in reward else ""
        rows.append((reward["name"], f"weight {reward['weight']:g}{source}"))
    return rows


def _prompt_text(prompt: PromptFormat) -> str:
    """The template and the place of the answer; a custom system prompt in full."""
    where = r"in its last `\boxed{}`"
    if prompt.solution is not None:
        where = f"between `{prompt.solution[0]}` and `{prompt.solution[1]}`"
    given = (
        "The chat template in the tokenizer adds the system prompt of the training where a "
        "conversation has none: without it the model was not trained to answer."
    )
    if prompt.system is None:
        given = "It was trained without a system prompt of this package."
    text = f"{given} The answer is {where}."
    if prompt.system in (None, PROJECT_PROMPT.system):
        return text
    lines = [f"    {printable(line)}" for line in prompt.system.splitlines()]
    return "\n".join([f"{text} The system prompt:\n", *lines])


def _header(
    base: str,
    license: str | None,
    library: str | None,
    rl: bool,
    name: str,
    results: Sequence[Any],
    datasets: Sequence[str],
) -> str:
    from huggingface_hub import ModelCardData

    terms: dict[str, Any] = {"license": license}
    if license is not None and license not in OPEN_LICENSES:
        link = f"https://huggingface.co/{base}/blob/main/LICENSE"
        terms = {"license": "other", "license_name": license, "license_link": link}
    data = ModelCardData(
        base_model=base if "/" in base else None,
        library_name=library,
        datasets=[*datasets] or None,
        pipeline_tag="text-generation",
        tags=["grpo" if rl else "sft", "unsloth", "sage"],
        model_name=name,
        eval_results=[*results] or None,
        **terms,
    ).to_dict()
    if not results:
        data.pop("model_name", None)  # it is the model-index's
    return f"---\n{yaml_text(data).rstrip()}\n---"


# Names come from users, hubs and files; in the card they are text, whatever they contain.


def _code(text: str) -> str:
    return f"`{' '.join(printable(text).split()).replace('`', '')}`"


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings that affect the result, without the prompt."""
    stage = RlvrConfig if settings.get("stage") == "rlvr" else SftConfig
    own = [item.name for item in fields(stage) if item.metadata["group"] not in UNUSED]
    own.remove("prompt")
    rows = []
    for key in ("stage", "guide", "rows", *own):
        value = settings.get(key)
        if isinstance(value, Mapping):
            rows += [(f"{key}.{inner}", v) for inner, v in value.items()]
        elif value not in (None, "", []):
            rows.append((key, value))
    return rows


def _pass_at_k(panels: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> str:
    """One table for each set of problems; k = 1, the middle one and the largest."""
    tables = []
    for title, models in panels.items():
        # Models may have different numbers of samples.
        ks = sorted(set.intersection(*map(set, models.values())), key=int)
        shown = list(dict.fromkeys((ks[0], ks[len(ks) // 2], ks[-1])))
        rows = [
            (model, *(f"{c[k]['mean']:.3f} [{c[k]['low']:.3f}, {c[k]['high']:.3f}]" for k in shown))
            for model, c in models.items()
        ]
        tables.append(_table((title, *(f"pass@{k}" for k in shown)), rows))
    return "\n\n".join(tables)


def _versions(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("python", environment["python"])]
    rows += [(name, version) for name, version in environment["packages"].items() if version]
    if environment.get("commit"):
        rows.append(("sage_unsloth, commit", environment["commit"]))
    return rows


def _license_text(base: str, license: str | None) -> str:
    if license is None:
        return (
            f"That of {_code(base)}, whose own card names it: look there before you share this "
            "model."
        )
    more = "" if license in OPEN_LICENSES else "; read its terms, which may exclude commercial use"
    return f"That of {_code(base)}: {escape_markdown(license)}{more}."


def _table(header: Sequence[str], rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([escape_markdown(str(cell)) for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
