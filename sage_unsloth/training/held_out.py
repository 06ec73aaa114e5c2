"""The held-out curve: pass@k of the policy during training, on problems it is not trained on.

    before the first step, every `eval_steps`, after the last one:
        N completions of every held-out problem, each by its own seed → graded → pass@1 … pass@N

Completions have the same seeds at every evaluation, so two points of the curve differ only by the
policy. Evaluations do not change the training (`policy_engine`).

The best adapter and early stopping are computed from the curve, and the curve from the rows of
`metrics.jsonl`. So they are correct after a resume: rows of steps that are trained again do not
count.
"""

import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.tokenizers import load_stop_tokens
from sage_unsloth.models.trained import write_readme
from sage_unsloth.runs.files import read_json, read_jsonl, whole_folder, write_json
from sage_unsloth.runs.processes import gather_rows, rank, wait_for_all
from sage_unsloth.runs.progress import progress
from sage_unsloth.runs.stopping import Terminated
from sage_unsloth.sampling.engines import BATCH_SIZES, SamplingConfig
from sage_unsloth.sampling.record_files import read_samples, read_settings, settings_path
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.trainers.rollout_weights import digest
from sage_unsloth.training.held_out_metrics import change_text, held_out_metrics
from sage_unsloth.training.held_out_schedule import best_metric, best_row, is_due, reason_to_end
from sage_unsloth.training.policy_engine import draws_by_vllm, policy_engine
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rollout_engine import rollout_sampling
from sage_unsloth.training.rows import METRICS, held_out_curve

HELD_OUT_FOLDER, BEST = "held-out", "best"
PROBLEMS = "problems.json"
"""In `held-out/`: the rows, by the ids in the completions."""
NOTE = "evaluation.json"
"""In `best/`: the row of its evaluation."""

logger = logging.getLogger(__name__)


class HeldOut:
    """Evaluates the policy of a run, saves the best adapter, and says when to stop.

    Every process creates one and calls its methods at the same steps; the first process samples.

    Args:
        config: of the run, with `eval_steps` > 0.
        rows: the held-out ones, with `id`, `problem` and `answer`.
        folder: of the run; gets `held-out/` with a record set for each evaluation, and `best/`.
        tokenizer: not the trainer's own; is saved in `best/` with the adapter.
    """

    def __init__(
        self,
        config: RlvrConfig,
        rows: Sequence[dict],
        folder: Path,
        trainer: Any,
        tokenizer: Any,
        model_path: str | Path,
        verifier: Checker = MATH,
    ) -> None:
        self.verifier = verifier
        self.config, self.rows, self.folder = config, rows, folder
        self.trainer, self.tokenizer = trainer, tokenizer
        self.stops = load_stop_tokens(model_path, tokenizer)
        self.metric = best_metric(config)
        self.sampling = held_out_sampling(config, vllm=draws_by_vllm(trainer))
        self.curve: list[Mapping[str, Any]] = []
        self.cause: signal.Signals | None = None
        """Signal that interrupted an evaluation; the resumed run starts with that evaluation."""

    def begin(self, step: int) -> dict[str, Any]:
        """Restores the curve up to this step and its best adapter, and evaluates if that is due.

        Returns:
            The row of the evaluation, or an empty one.
        """
        log = self.folder / METRICS
        self.curve = held_out_curve(read_jsonl(log) if log.exists() else [], step)
        if rank() == 0:
            (self.folder / HELD_OUT_FOLDER).mkdir(exist_ok=True)
            write_json(self.folder / HELD_OUT_FOLDER / PROBLEMS, [dict(row) for row in self.rows])
            self._restore_best(step)
        wait_for_all()
        row = self.evaluate_step(step)
        checkpoint = self._checkpoint(step)
        if row and rank() == 0 and checkpoint.is_dir():
            # Saved before this evaluation, so its copy of the best adapter may be an older one.
            self.copy_best(checkpoint)
        return row

    def evaluate_step(self, step: int) -> dict[str, Any]:
        """The metrics of the policy after this optimizer step.

        Empty if no evaluation is due, or a signal interrupted it (`cause`).
        """
        if not is_due(self.config, self.curve, step):
            return {}
        result: Any = None
        if rank() == 0:
            try:
                result = self._evaluate(step)
            # Not raised here: the trained step must be saved before the run ends.
            except KeyboardInterrupt:
                result = signal.SIGINT
            except Terminated as stopped:
                result = stopped.signum
        # All processes wait here, or they would begin the next step while the first one evaluates.
        result = gather_rows([result])[0]
        if isinstance(result, signal.Signals):
            self.cause = result
            return {}
        row = {"step": step} | result
        self.curve.append(row)
        if rank() == 0 and best_row(self.config, self.curve) is row:
            self._keep_best(row)
        return row

    @property
    def reason_to_end(self) -> str:
        """Why the run ends after these evaluations; empty if it goes on."""
        return reason_to_end(self.config, self.curve)

    def copy_best(self, checkpoint: Path) -> None:
        """Copies the best adapter so far into a checkpoint, for a run that resumes there."""
        if (self.folder / BEST).is_dir():
            place = checkpoint / HELD_OUT_FOLDER / BEST
            shutil.rmtree(place, ignore_errors=True)
            # Hard links, since each checkpoint holds the best adapter so far.
            shutil.copytree(self.folder / BEST, place, copy_function=_link)

    def report(self) -> None:
        """Logs which evaluation was best, and whether pass@k fell."""
        best = best_row(self.config, self.curve)
        if best is None or rank() > 0:
            return
        logger.info(
            "Held-out %s: %.3f before training, %.3f at step %d, where it was best, %.3f at step "
            "%d. %s is the adapter of step %d.%s %s",
            self.metric.removeprefix("eval/"),
            self.curve[0][self.metric],
            best[self.metric],
            best["step"],
            self.curve[-1][self.metric],
            self.curve[-1]["step"],
            self.folder / BEST,
            best["step"],
            " No step of training was better than none." if best["step"] == 0 else "",
            change_text(self.curve[-1], self.config.eval_samples),
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        started = time.perf_counter()
        path = self.folder / HELD_OUT_FOLDER / _records_of(step)
        policy = policy_digest(self.trainer.model)
        # With the same weights an interrupted evaluation is resumed, and its samples are used.
        _forget_other_policy(path, policy)
        quiet = progress(disable=True)
        with policy_engine(self.trainer, self.tokenizer, self.stops) as engine:
            records = sample_and_grade(
                self.sampling,
                engine,
                self.rows,
                path,
                model=f"step {step}",
                benchmark="held-out",
                identity={"policy": policy},
                checker=self.verifier,
                boxed=False,
                prompt=self.config.prompt,
                bar=quiet,
            )
        seconds = time.perf_counter() - started
        start = path.with_name(_records_of(0))
        before = read_samples(start) if step and start.is_file() else ()
        return held_out_metrics(records, self.rows, before) | {"eval/seconds": round(seconds, 3)}

    def _keep_best(self, row: Mapping[str, Any]) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        # A teacher may be another adapter of the model.
        adapter = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
        with whole_folder(self.folder / BEST, replace=True) as partial:
            model.save_pretrained(partial, **adapter)
            self.tokenizer.save_pretrained(partial)
            if adapter:
                write_readme(partial)
            write_json(partial / NOTE, dict(row))

    def _checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"checkpoint-{step}"

    def _restore_best(self, step: int) -> None:
        """`best/` as it was at this step: a later one belongs to steps that are trained again."""
        best, place = best_row(self.config, self.curve), self.folder / BEST
        checkpoint = self._checkpoint(step)
        best_step = None if best is None else best["step"]
        if best_step is None or best_step != _step_of(place):
            copy = checkpoint / HELD_OUT_FOLDER / BEST
            if best_step is not None and best_step == _step_of(copy):
                # The checkpoint has the adapter that was best when it was saved.
                with whole_folder(place, replace=True) as partial:
                    shutil.copytree(copy, partial)
            else:
                shutil.rmtree(place, ignore_errors=True)
                if best_step is not None:
                    logger.warning(
                        "The adapter of step %d, which was best by %s, is gone. The next better "
                        "one becomes %s.",
                        best_step,
                        self.metric,
                        place,
                    )
        if (
            best_step is not None
            and checkpoint.is_dir()
            and not (checkpoint / HELD_OUT_FOLDER).is_dir()
        ):
            # The run was killed between writing the checkpoint and copying the adapter into it.
            self.copy_best(checkpoint)


def held_out_sampling(config: RlvrConfig, *, vllm: bool) -> SamplingConfig:
    """Samples as training does."""
    # The memory plan is for this batch.
    batch = config.completions_per_step
    if not has_gpu():
        # On a CPU small batches waste time, and no memory was planned.
        batch = max(batch, BATCH_SIZES["transformers"])
    return rollout_sampling(config, config.eval_samples, BATCH_SIZES["vllm"] if vllm else batch)


def policy_digest(model: Any) -> str:
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return hashlib.sha256(json.dumps(digest(weights), sort_keys=True).encode()).hexdigest()[:16]


def _forget_other_policy(path: Path, policy: str) -> None:
    """Deletes samples of other weights: their step has been trained again since."""
    settings = settings_path(path)
    same = settings.exists() and read_settings(path)["settings"].get("policy") == policy
    if not same:
        for file in (path, settings):
            file.unlink(missing_ok=True)


def _records_of(step: int) -> str:
    return f"step-{step:06d}.jsonl"


def _step_of(best: Path) -> int | None:
    return read_json(best / NOTE)["step"] if (best / NOTE).is_file() else None


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where links are not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
