"""The folder of a run: what it holds, whether a run may go on in it, and how one begins and ends
there.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.processes import rank
from sage_unsloth.runs.record import (
    open_run,
    read_record,
    refuse_other_settings,
    refuse_strangers,
)
from sage_unsloth.runs.settings import values_where
from sage_unsloth.training.rows import METRICS

logger = logging.getLogger(__name__)


def result_folder(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Where a run of these settings puts its result: `model/` in SFT and full fine-tuning, else
    `adapter/`.
    """
    whole = settings["stage"] == "sft" or settings.get("full_finetuning", False)
    return folder / ("model" if whole else "adapter")


class Ledger:
    """The folder of a run of a stage, "sft" or "rlvr". It is compared before anything is loaded,
    begun once the rows are known, and completed when the result is there.
    """

    def __init__(self, folder: str | Path, stage: str) -> None:
        self.folder, self.stage = Path(folder), stage
        self.checkpoints = self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    def recorded(self) -> dict | None:
        """The settings of a run of this stage that has trained a step already."""
        run = read_record(self.folder)
        if run is None or run["settings"].get("stage") != self.stage or not self.metrics.is_file():
            return None
        return run["settings"] | run["free_settings"]

    def result(self) -> Path | None:
        """What a finished run left; None where the folder's run is of another stage, or goes on."""
        run = read_record(self.folder)
        if run is None or run["settings"].get("stage") != self.stage:
            return None
        trained = result_folder(self.folder, run["settings"])
        return trained if trained.is_dir() else None

    def compare(self, settings: dict) -> None:
        """What `begin` will refuse, as far as it is known before the rows are.

        That is another process in the folder, a place where nothing can be written, files of
        something else, other settings.

        Args:
            settings: `stage.known_settings`.

        Raises:
            ValueError, OSError: see `locks.exclusive_lock` and `record.open_run`.
        """
        with exclusive_lock(self.folder):
            run = read_record(self.folder)
            if run is None:
                if self.folder.exists():
                    refuse_strangers(self.folder)
                return
            recorded, names = run["settings"], ("stage",)
            if self.metrics.exists():
                names = tuple(settings)
                self._refuse_more_steps(recorded, settings)
            refuse_other_settings(
                self.folder,
                {name: recorded[name] for name in names if name in recorded},
                json.loads(json.dumps({name: settings[name] for name in names})),
            )

    def begin(
        self,
        settings: dict,
        config: Any,
        model_path: str | Path,
        data: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        """Open the folder, whose settings are fixed from its first optimizer step on.

        Until then (it ran out of memory, say) a run takes new settings, and the files of a
        preflight under the old ones are deleted.

        Args:
            settings: in which a run that resumes must agree (`stage.run_settings`).
            config: of the stage, whose free settings are noted.
            model_path: folder or hub id.
            data: where the rows are from, kept beside the settings, which have the rows' digest.
            command: the words that started it, by which `--config run.json` repeats it.

        Raises:
            ValueError: see `record.open_run`.
        """
        run, begun = read_record(self.folder), True
        if run is not None and self.metrics.exists():
            self._refuse_more_steps(run["settings"], settings)
        elif run is not None and run["settings"].get("stage") == settings["stage"]:
            begun = run["settings"] == json.loads(json.dumps(settings))
        if not begun:
            logger.info(
                "%s has trained no step yet, so it takes the new settings; a preflight under the "
                "old ones is deleted.",
                self.folder,
            )
            for file in self.folder.glob("preflight.*"):
                file.unlink()
        notes: dict[str, Any] = {"model_path": str(model_path)}
        notes["free_settings"] = values_where(config, "free")
        if data:
            notes["data"] = dict(data)
        if command:
            notes["command"] = list(command)
        open_run(self.folder, settings, begun=begun, **notes)

    def complete(self, result: Path) -> None:
        """Check that a step of training made the result, and delete the checkpoints.

        Raises:
            ValueError: `metrics.jsonl` is not there, or has no row.
        """
        if not self.metrics.exists() or not read_jsonl(self.metrics):
            raise ValueError(
                f"a result must come from a step of training, each of which has a row in {METRICS};"
                f" {result} is there, and {self.metrics} has none; put the file back, or delete "
                f"{self.folder} and train again"
            )
        if rank() == 0:
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def check_checkpoints(self, resume: Path | None, save_steps: int) -> None:
        """Refuse to begin a run anew that has trained past its first checkpoint, and has none left.

        Args:
            resume: its newest complete checkpoint.
            save_steps: optimizer steps between checkpoints, as asked for now. Where the run began
                with more, those count: the first one may not have been due yet.

        Raises:
            ValueError: the checkpoints are gone.
        """
        run = read_record(self.folder)
        if resume is not None or run is None or not self.metrics.exists():
            return
        trained = max((row["step"] for row in read_jsonl(self.metrics)), default=0)
        due = max(save_steps, run["free_settings"]["save_steps"])
        if trained > due:
            raise ValueError(
                f"a run resumes from its checkpoints, of which one was due after {due} steps; "
                f"{self.folder} has trained {trained} steps and has no complete one in "
                f"checkpoints/; put them back, choose another --out, or move {METRICS} away to "
                "train from the start"
            )

    def _refuse_more_steps(self, recorded: Mapping[str, Any], settings: dict) -> None:
        """Refuse to make a run longer; no other setting of it is looked at.

        Raises:
            ValueError: with what to do instead.
        """
        had, requested = recorded.get("max_steps", -1), settings["max_steps"]
        if recorded.get("stage") == settings["stage"] and 0 < had < requested:
            is_sft = settings["stage"] == "sft"
            onwards = f"--model {self.folder / 'model'}" if is_sft else f"--from {self.folder}"
            raise ValueError(
                "a run has the steps that it began with, because its learning rate is scheduled "
                "over them and its optimizer's state is deleted after the last; "
                f"{self.folder} has {had}, and this asks for {requested}; train what it leaves "
                f"further by {onwards} with another --out, or begin anew with another --out"
            )
