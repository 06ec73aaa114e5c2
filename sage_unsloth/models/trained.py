"""What a finished run left: the model that it started from, and its adapter or merged model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_json
from sage_unsloth.runs.record import RECORD, read_record


@dataclass(frozen=True)
class Run:
    """A finished SFT or RL run on disk.

    Attributes:
        folder: of the run.
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
        """Whether it was trained on 4-bit weights: then its policy is its adapter on these."""
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
    """The README of an adapter's folder, in the place of the form that peft leaves to fill in."""
    (adapter / "README.md").write_text(README, encoding="utf-8")


def trained_in_4bit(adapter: str | Path) -> bool:
    """Whether an adapter was trained on 4-bit weights, as its run says (it is the run's `adapter/`
    or `best/`), or its export; False where neither is there.
    """
    folder = Path(adapter).absolute()
    for file, key in ((folder / EXPORT, "run"), (folder.parent / "run.json", "settings")):
        if file.is_file():
            return read_json(file)[key].get("load_in_4bit", False)
    return False


def read_run(folder: str | Path, model_path: str | Path | None = None, which: str = "last") -> Run:
    """What a run left.

    Args:
        folder: of the run.
        model_path: the model that the run started from; None takes it from `run.json`.
        which: "last", what the last step left, or "best", the best of the run's evaluations on
            held-out rows.

    Raises:
        ValueError: not the folder of a stage, nothing finished in it, no such evaluation, or the
            starting model is not known.
    """
    folder = Path(folder)
    record = read_record(folder)
    inside = ", ".join(sorted(p.parent.name for p in folder.glob("*/run.json")))
    hint = f"; give one of {inside} in it" if inside else ""
    if record is None:
        raise ValueError(
            f"what a run trained is in the folder of an SFT or RL run, with run.json; got {folder}"
            f"{hint}"
        )
    if record["settings"].get("stage") not in ("sft", "rlvr"):
        raise ValueError(f"it takes an SFT or RL run; {folder} is another kind{hint}")
    adapter, merged = (p if p.exists() else None for p in (folder / "adapter", folder / "model"))
    if adapter is None and merged is None:
        raise ValueError(
            f"a run must be complete to be used; {folder} has neither adapter/ nor model/; start "
            "its command again, which resumes it (of a run whose steps are all done it writes the "
            "result)"
        )
    if record["settings"]["stage"] == "rlvr" and adapter is not None:
        merged = None  # it may have been made later, for a second stage; the adapter is the result
    if which == "best":
        best = folder / "best"
        if not best.is_dir():
            raise ValueError(
                "best/ is left by a run of `train` with evaluations on held-out rows; there is "
                f"none in {folder}; train with --eval-steps 50, or take the last step's"
            )
        whole = record["settings"].get("full_finetuning", False)
        adapter, merged = (None, best) if whole else (best, None)
    model_path = model_path or record.get("model_path")
    if model_path is None:
        raise ValueError(
            f"the starting model must be known; {folder / RECORD} does not name its path, only "
            f"{record['settings'].get('model')!r}; give it by --model (export), or as "
            f"MODEL+{adapter or folder} (evaluate)"
        )
    return Run(folder, record, str(model_path), adapter, merged)
