"""The result of a finished run: its start model, and its adapter or merged model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_json
from sage_unsloth.runs.record import RECORD, read_record


@dataclass(frozen=True)
class Run:
    """A finished SFT or RL run on disk.

    Attributes:
        record: its `run.json`.
        model_path: the model that it started from, a folder or a hub id.
        adapter: the trained adapter's folder, or None.
        merged: the folder of SFT's merged model, or of a fully trained one, or None.
    """

    folder: Path
    record: dict[str, Any]
    model_path: str
    adapter: Path | None
    merged: Path | None

    @property
    def in_4bit(self) -> bool:
        """Whether it was trained on 4-bit weights: its policy is then its adapter on these."""
        return self.record["settings"].get("load_in_4bit", False)


EXPORT = "export.json"
"""An export's record of its run's settings and of what was checked."""
README = """# A LoRA adapter

Trained by sage_unsloth. `adapter_config.json` names the model that it belongs on, and `run.json` in
the folder above has the settings of its training. With RUN that folder:

```bash
python -m sage_unsloth evaluate --models mine=RUN --benchmarks math500-l5
python -m sage_unsloth export RUN --to adapter   # with a model card, and an example that runs
```
"""


def write_readme(adapter: Path) -> None:
    """Writes the README of an adapter's folder, instead of peft's form."""
    (adapter / "README.md").write_text(README, encoding="utf-8")


def trained_in_4bit(adapter: str | Path) -> bool:
    """Whether an adapter was trained on 4-bit weights, by its run or its export; else False.

    An adapter belongs to a run as its `adapter/` or `best/`.
    """
    folder = Path(adapter).absolute()
    for file, key in ((folder / EXPORT, "run"), (folder.parent / "run.json", "settings")):
        if file.is_file():
            return read_json(file)[key].get("load_in_4bit", False)
    return False


def read_run(folder: str | Path, model_path: str | Path | None = None, which: str = "last") -> Run:
    """The result of a run.

    Args:
        model_path: its start model; None takes it from `run.json`.
        which: "last" step, or "best" of the evaluations on held-out rows.

    Raises:
        ValueError: not the folder of a stage, no result, no such evaluation, or an unknown start
            model.
    """
    folder = Path(folder)
    record = read_record(folder)
    inside = ", ".join(sorted(p.parent.name for p in folder.glob("*/run.json")))
    hint = f". Give one of {inside} in it" if inside else ""
    if record is None:
        raise ValueError(
            f"this needs the folder of an SFT or RL run, with run.json, got {folder}{hint}"
        )
    if record["settings"].get("stage") not in ("sft", "rlvr"):
        raise ValueError(f"this needs an SFT or RL run, but {folder} is of another kind{hint}")
    adapter, merged = (p if p.exists() else None for p in (folder / "adapter", folder / "model"))
    if adapter is None and merged is None:
        raise ValueError(
            f"a run must be complete to be used, but {folder} has neither adapter/ nor model/. Run "
            "its command again, which resumes it"
        )
    if record["settings"]["stage"] == "rlvr" and adapter is not None:
        merged = None  # it may have been made later, for a second stage; the adapter is the result
    if which == "best":
        best = folder / "best"
        if not best.is_dir():
            raise ValueError(
                f"best/ needs a run with evaluations on held-out rows, but {folder} has none. "
                "Train with --eval-steps 50, or use the last step's"
            )
        whole = record["settings"].get("full_finetuning", False)
        adapter, merged = (None, best) if whole else (best, None)
    model_path = model_path or record.get("model_path")
    if model_path is None:
        raise ValueError(
            f"the starting model must be known, but {folder / RECORD} does not name its path, only "
            f"{record['settings'].get('model')!r}. Give it by --model (export), or as "
            f"MODEL+{adapter or folder} (evaluate)"
        )
    return Run(folder, record, str(model_path), adapter, merged)
