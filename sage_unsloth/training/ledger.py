"""A run's folder: whether a run may start or resume in it, and how it is completed."""

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

SAMPLED_BEFORE = ("preflight.*", "guide_dose.json", "rehearsal.*", "held-out/step-000000.*")
"""What a run samples before its first step."""

logger = logging.getLogger(__name__)


def result_folder(folder: Path, settings: Mapping[str, Any]) -> Path:
    """The folder of the result: `model/` in SFT and full fine-tuning, else `adapter/`."""
    whole = settings["stage"] == "sft" or settings.get("full_finetuning", False)
    return folder / ("model" if whole else "adapter")


class Ledger:
    """The folder of a run of a stage, "sft" or "rlvr".

    It is compared before anything is loaded, opened once the rows are known, and completed when the
    result exists.
    """

    def __init__(self, folder: str | Path, stage: str) -> None:
        self.folder, self.stage = Path(folder), stage
        self.checkpoints = self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    def recorded_settings(self) -> dict | None:
        """The settings of a run of this stage that has trained at least one step."""
        run = read_record(self.folder)
        if run is None or run["settings"].get("stage") != self.stage or not self.metrics.is_file():
            return None
        return run["settings"] | run["free_settings"]

    def result(self) -> Path | None:
        """A finished run's result; None if the run is of another stage, or not finished."""
        run = read_record(self.folder)
        if run is None or run["settings"].get("stage") != self.stage:
            return None
        trained = result_folder(self.folder, run["settings"])
        return trained if trained.is_dir() else None

    def compare(self, settings: dict) -> None:
        """Raises early what `begin` would refuse, as far as it is known before the rows are.

        Checked are: another process in the folder, no write access, unknown files, other settings.

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
            # Without a trained step only the stage is fixed; other settings may still change.
            recorded, names = run["settings"], ("stage",)
            if self.metrics.exists():
                names = tuple(settings)
                self._refuse_more_steps(recorded, settings)
            refuse_other_settings(
                self.folder,
                {name: recorded[name] for name in names if name in recorded},
                # As JSON gives them back: tuples become lists.
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
        """Opens the folder; settings are fixed from the first optimizer step on.

        Until then (after running out of memory, say) new settings are accepted, and what was
        sampled under the old ones is deleted.

        Args:
            settings: must be equal to resume (`stage.run_settings`).
            config: of the stage; its free settings are recorded too.
            data: origin of the rows, recorded next to the settings, which have the rows' digest.
            command: the words of the command, so that `--config run.json` can repeat it.

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
                "%s has trained no step yet, so it takes the new settings. What was sampled under "
                "the old ones is deleted.",
                self.folder,
            )
            for pattern in SAMPLED_BEFORE:
                for file in self.folder.glob(pattern):
                    file.unlink()
        notes: dict[str, Any] = {"model_path": str(model_path)}
        notes["free_settings"] = values_where(config, "free")
        if data:
            notes["data"] = dict(data)
        if command:
            notes["command"] = list(command)
        open_run(self.folder, settings, begun=begun, **notes)

    def complete(self, result: Path) -> None:
        """Checks that training steps made the result, and deletes the checkpoints.

        Raises:
            ValueError: `metrics.jsonl` is missing, or has no row.
        """
        if not self.metrics.exists() or not read_jsonl(self.metrics):
            raise ValueError(
                f"a result needs training steps in {METRICS}, but {result} is there and "
                f"{self.metrics} has none. Put the file back, or delete {self.folder} and train "
                "again"
            )
        if rank() == 0:
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def check_checkpoints(self, resume: Path | None, save_steps: int) -> None:
        """Refuses to restart a run that has trained past its first checkpoint and lost it.

        Args:
            save_steps: optimizer steps between checkpoints now. A larger value at the run's start
                counts instead, because the first checkpoint may not have been due yet.

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
                f"a run resumes from its checkpoints (one is due after {due} steps), but "
                f"{self.folder} has trained {trained} steps and has none complete. Put them back, "
                f"choose another --out, or move {METRICS} away to train from the start"
            )

    def _refuse_more_steps(self, recorded: Mapping[str, Any], settings: dict) -> None:
        """Raises ValueError if the run would become longer; no other setting is compared."""
        # The learning rate falls over max_steps, so a longer run would have been another one.
        had, requested = recorded.get("max_steps", -1), settings["max_steps"]
        if recorded.get("stage") == settings["stage"] and 0 < had < requested:
            is_sft = settings["stage"] == "sft"
            onwards = f"--model {self.folder / 'model'}" if is_sft else f"--from {self.folder}"
            raise ValueError(
                f"the number of steps of a run is fixed: {self.folder} has {had}, got {requested}. "
                f"Train its result further by {onwards} with another --out, or start a new run "
                "there"
            )
