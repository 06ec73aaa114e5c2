"""A figure that is updated in a notebook while a run trains.

    from sage_unsloth.training.live import LivePlot

    trainer.add_callback(LivePlot())    # or run_rlvr(..., callbacks=[LivePlot()])

It imports transformers and matplotlib only when training begins, so it can be created before
Unsloth is loaded.
"""

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.figures import BLUE, line_styles, new_figure
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.progress import in_notebook
from sage_unsloth.training.figures import held_out_panels, moving_average, plot_evaluations
from sage_unsloth.training.rows import numbers
from sage_unsloth.training.stage import METRICS

LOSS_TITLE = "loss (nats per token)"  # of SFT; meaningless in RL, where advantages sum to 0
PANELS = {
    "mean reward": ("reward",),
    "KL to the reference (nats)": ("kl/ref_k3", "kl"),
    "mean token entropy (nats)": ("sage/entropy", "entropy"),
    "groups without a signal (share)": ("advantages/dead_groups", "frac_reward_zero_std"),
    LOSS_TITLE: ("loss",),
}
"""Title of a panel -> its metrics; the first one that was logged is drawn."""


class LivePlot:
    """A callback that draws reward, KL, entropy, groups without a signal and held-out pass@k.

    The figure below the cell is updated at most every `seconds`, and when training ends. Outside a
    notebook it does nothing. It uses what the trainer logs, so it works with `rlvr`
    (`callbacks=[LivePlot()]`) and any trainer (`trainer.add_callback(LivePlot())`); a metric that
    is not logged has no panel. A resumed `rlvr` run shows its earlier steps too.

    Args:
        seconds: between two updates.
        window: optimizer steps of the centred moving average over the raw values.
    """

    def __init__(self, seconds: float = 2.0, window: int = 9) -> None:
        self.seconds, self.window = seconds, window
        self.rows: list[dict[str, Any]] = []
        self._handle: Any = None
        self._drawn = 0.0

    def __getattr__(self, name: str) -> Any:
        # Any other event of the trainer, in any version of transformers.
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts with the steps that the run's folder already has."""
        log = Path(args.output_dir).parent / METRICS
        # Rows after the checkpoint are of steps that are trained again.
        earlier = read_jsonl(log) if state.global_step and log.is_file() else []
        self.rows = [row for row in earlier if row.get("step", 0) <= state.global_step]
        self._handle, self._drawn = None, 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds a row of metrics, and redraws if the last drawing is old enough."""
        # Every process logs, one draws.
        if logs and state.is_world_process_zero:
            self.rows.append(numbers(logs) | {"step": state.global_step})
            if time.monotonic() - self._drawn >= self.seconds:
                self._show()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._show()

    def _show(self) -> None:
        if not in_notebook():
            return
        image = live_figure(self.rows, self.window)
        if image is None:
            return
        from IPython.display import Image, display

        # One display handle: updating it replaces the image instead of adding one.
        if self._handle is None:
            self._handle = display(Image(data=image), display_id=True)
        else:
            self._handle.update(Image(data=image))
        self._drawn = time.monotonic()


def live_figure(rows: Sequence[Mapping[str, Any]], window: int = 9) -> bytes | None:
    """The PNG of `PANELS` over `rows`, each with `step`; None if no panel has a value."""
    panels, is_rl = {}, any("reward" in row for row in rows)
    for title, metrics in PANELS.items():
        if title == LOSS_TITLE and is_rl:
            continue
        shown = next((m for m in metrics if any(_is_number(row.get(m)) for row in rows)), None)
        if shown is not None:
            panels[title] = [
                (row["step"], row[shown]) for row in rows if _is_number(row.get(shown))
            ]
    held_out = held_out_panels(rows)
    if not panels and not held_out:
        return None
    figure, axes = new_figure(len(panels) + len(held_out))
    for axis, (title, points) in zip(axes, panels.items(), strict=False):
        steps, values = zip(*points, strict=True)
        axis.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.8)
        axis.plot(steps, moving_average(values, window), color=BLUE)
        axis.set(title=title, xlabel="optimizer step")
    for axis, (title, curves) in zip(axes[len(panels) :], held_out.items(), strict=True):
        styles = line_styles(curves, first=2)
        for label, metric in curves.items():
            plot_evaluations(axis, rows, metric, label=label, **styles[label])
        axis.legend(frameon=False, fontsize=8)
        axis.set(title=title, xlabel="optimizer step")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=80)
    return png.getvalue()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
