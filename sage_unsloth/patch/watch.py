"""The callback of an open `guided_kl`: no step bypasses it, and a guide with a state is steered and
kept.
"""

import shutil
from pathlib import Path
from typing import Any

from sage_unsloth.objective.guides import SteeredGuide
from sage_unsloth.patch.unsloth_names import LOSS, ContractError

STATE = "SageGuide"
"""Where a checkpoint's trainer_state.json holds the guide's state."""


def guide_watch(hook: Any, teacher: Any) -> Any:
    """A callback that stops training after the first optimizer step that bypassed the hook, and
    steers a guide with a state.

    It also takes the adapter of a teacher out of each checkpoint: transformers, finding it there,
    would restore it and not the policy's.
    """
    from transformers import TrainerCallback

    class GuideWatch(TrainerCallback):
        seen = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not isinstance(hook.guide, SteeredGuide):
                return
            kept = state.stateful_callbacks.get(STATE)
            if kept is None and state.global_step > 0:
                raise ValueError(
                    f"a checkpoint must hold the state of the guide that it was trained with; "
                    f"the one of step {state.global_step} "
                    f"holds none for {hook.guide!r}; go on with the guide that it was trained "
                    f"with, or start anew"
                )
            hook.guide.restore(None if kept is None else kept["attributes"])
            self.keep(state)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if hook.consulted == self.seen:
                raise ContractError(
                    f"every optimizer step must consult the guide; step {state.global_step} did not",
                    found="a loss that bypasses the patched function",
                    expected=f"a call of {LOSS}",
                )
            self.seen = hook.consulted
            if isinstance(hook.guide, SteeredGuide):
                hook.guide.after_step(hook.of_step.values)
                hook.metrics_of_step.clear()
                self.keep(state)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if isinstance(teacher, str) and state.is_world_process_zero:
                checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                shutil.rmtree(checkpoint / teacher, ignore_errors=True)

        def keep(self, state: Any) -> None:
            """The trainer writes this dict into every checkpoint's trainer_state.json."""
            state.stateful_callbacks[STATE] = {"args": {}, "attributes": hook.guide.state()}

    return GuideWatch()
