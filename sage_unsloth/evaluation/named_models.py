"""The models of an evaluation as a user names them: presets, runs, adapters, folders, hub ids."""

import re
from pathlib import Path

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.models.embedded import locate_model
from sage_unsloth.models.trained import read_run, trained_in_4bit
from sage_unsloth.models.weights import adapter_config, model_identity
from sage_unsloth.planning.presets import MODELS
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.runs.files import read_json


def parse_model(
    text: str,
    template: str | None = None,
    prompt: PromptFormat | None = None,
    load_in_4bit: bool | None = None,
) -> ModelSpec:
    """`NAME=MODEL` or `NAME=MODEL+ADAPTER`; each may be the folder of a run (`find_model`).

    Args:
        template, prompt: see `ModelSpec`.
        load_in_4bit: quantise the weights; None follows the adapter's or run's training. For a
            4-bit SFT run its adapter is then used on the start model, not the merged model in full
            precision.

    Raises:
        ValueError: another form, a name with characters other than letters, digits, ".", "-", "_",
            or see `find_model`.
    """
    name, equals, path = text.partition("=")
    if not equals or not path or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            "a model must be NAME=MODEL or NAME=MODEL+ADAPTER, with letters, digits, '.', '-' and "
            f"'_' in the name, got {text!r}"
        )
    adapter = None
    if "+" in path and not Path(path).exists():
        path, _, adapter = path.partition("+")
    path, own = find_model(path, load_in_4bit)
    if adapter is not None and own is not None:
        raise ValueError(
            f"a model has one adapter at a time, got {own} and {adapter} for {name}. Give the "
            "model below them, or one of the two"
        )
    adapter = own if adapter is None else find_adapter(adapter)
    if load_in_4bit is None:
        load_in_4bit = adapter is not None and trained_in_4bit(adapter)
    return ModelSpec(
        name=name,
        path=path,
        adapter=adapter,
        template=template,
        prompt=prompt,
        load_in_4bit=load_in_4bit,
    )


def find_model(path: str, load_in_4bit: bool | None = None) -> tuple[str, str | None]:
    """Folder or hub id of a named model, and its adapter's folder or None.

    Args:
        path: a preset's name, a model's folder, an SFT or RL run's, an adapter's, or a hub id.
        load_in_4bit: see `parse_model`.

    Raises:
        ValueError: an unknown or missing folder, a run that is not complete, or an adapter whose
            base cannot be determined.
    """
    if path in MODELS:
        return locate_model(MODELS[path].hub_id), None
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
            raise ValueError(
                f"a model must be one of {', '.join(MODELS)}, a folder, or a hub id, but there is "
                f"no folder {path}"
            )
        return path, None
    if (folder / "config.json").is_file():
        return path, None
    if (folder / "adapter_config.json").is_file():
        return _base_of(folder), path
    if not (folder / "run.json").is_file() and not list(folder.glob("*/run.json")):
        raise ValueError(
            "a folder must be a model's (config.json), an adapter's (adapter_config.json) or a "
            f"run's (run.json), but {path} has none of these"
        )
    run = read_run(folder)
    as_trained = run.in_4bit and run.adapter is not None and load_in_4bit is not False
    if run.merged is not None and not as_trained:
        return str(run.merged), None
    if run.merged is None and run.record["settings"]["stage"] == "sft":
        raise ValueError(
            f"a run must be complete to be used, but {path} has no model/ yet. Start its command "
            "again"
        )
    return _checked_base(run.model_path, run.adapter), str(run.adapter)


def find_adapter(path: str) -> str:
    """The folder of an adapter, or of the adapter of a run."""
    return str(Path(path) / "adapter") if (Path(path) / "run.json").is_file() else path


def _base_of(adapter: Path) -> str:
    """The model that an adapter was trained on, from its run or else from its config."""
    record = adapter.absolute().parent / "run.json"
    named = read_json(record).get("model_path") if record.is_file() else None
    return _checked_base(named or adapter_config(adapter).get("base_model_name_or_path"), adapter)


def _checked_base(base: str | None, adapter: Path | None) -> str:
    local = base is None or Path(base).is_absolute() or base.count("/") != 1
    if base is None or (local and not Path(base).is_dir()):
        raise ValueError(
            f"an adapter needs the model that it was trained on, but {adapter} names {base!r}, "
            f"which is not there. Give MODEL+{adapter}"
        )
    record = None if adapter is None else adapter.absolute().parent / "run.json"
    if record is not None and record.is_file() and Path(base).is_dir():
        # A relative path may lead to another project's model of the same name.
        recorded = str(read_json(record).get("settings", {}).get("model", "")).rpartition(" ")[2]
        if re.fullmatch("[0-9a-f]{12}", recorded) and recorded != model_identity(base)["weights"]:
            raise ValueError(
                f"an adapter needs the model that it was trained on, but {base}, which {adapter} "
                f"names, has other weights here. Give MODEL+{adapter}"
            )
    return base
