"""Prints completions while a run trains."""

from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.stage import COMPLETIONS


class ShowCompletions:
    """A callback that prints some completions of each sampled step (`sample_steps`).

    run_rlvr(out, ..., sample_steps=10, callbacks=[ShowCompletions(out)])
    """

    def __init__(self, folder: str | Path, count: int = 2, characters: int = 300) -> None:
        self.file = Path(folder) / COMPLETIONS
        self.count, self.characters = count, characters
        self._seen = 0  # rows of the file

    def __getattr__(self, name: str) -> Any:
        # Any other event of the trainer, in any version of transformers.
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Skips what an earlier part of the run has written."""
        self._seen = len(self._rows())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Prints the completions that are new in the file."""
        if not state.is_world_process_zero:
            return
        rows = self._rows()
        for row in rows[self._seen :][: self.count]:
            text = " ".join(row["completion"].split())[: self.characters]
            print(f"step {row['step']}, {row['grade']} (answer {row['answer']}): {text}")
        self._seen = len(rows)

    def _rows(self) -> list[dict]:
        return read_jsonl(self.file) if self.file.is_file() else []
