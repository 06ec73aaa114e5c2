"""What a user sees of a finished stage: tables, and the next command."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.models.device import has_gpu
from sage_unsloth.problems.benchmarks import NAMES
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.sources import SUFFIXES
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.trainers.backends import TRL, backend
from sage_unsloth.training.embedded_settings import SAMPLING
from sage_unsloth.training.preflight import PREFLIGHT_FILE, SHARES, answers_remedy
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig
from sage_unsloth.training.starting import EMBEDDED, StartingPoint, model_path

HELD_OUT = "HELD_OUT.jsonl"
"""Placeholder for a file of questions that were not trained on."""


def evaluation_command(
    point: StartingPoint,
    name: str,
    run: Path,
    config: RlvrConfig,
    *,
    smoke: bool = False,
    data: str | None = None,
    columns: Columns | None = None,
    eval_file: str | Path | None = None,
    verifier: Sequence[str] = (),
) -> str:
    """The command that compares a run's model with its start, at a size that fits the model.

    As many samples as the quickstart for the embedded model, the paper's for others, and a few
    without a GPU.

    Args:
        data: custom data of the run. For a hub data set the test split is evaluated; for a file
            `HELD_OUT` is the placeholder.
        columns: of `data`.
        eval_file: of the run's held-out curve, used instead of the placeholder.
        verifier: the run's `verifier_options`.
    """
    embedded = point.preset.name == EMBEDDED
    # The name, not the path of this machine.
    below = EMBEDDED if embedded and point.model == model_path(point.preset) else point.model
    before = f"{below}+{point.adapter}" if point.adapter else below
    words = ["evaluate", "--models", f"start={before}", f"{name}={run}", "--benchmarks"]
    if data is None:
        words += ["arithmetic"] if embedded else ["aime", "amc23", "math500-l5"]
    elif data.startswith("reasoning-gym:"):
        words.append(data)
    else:
        is_file = Path(data).suffix in SUFFIXES
        name = "held-out" if is_file else Path(data.partition(":")[0]).stem
        name = f"own-{name}" if name in NAMES else name
        words += [f"{name}={(eval_file or HELD_OUT) if is_file else data}"]
        words += (columns or Columns()).options()
    if smoke:
        words.append("--smoke")
    elif embedded:
        words += ["--n", f"{SAMPLING.num_samples}", "--batch", f"{SAMPLING.batch_size}"]
    elif not has_gpu():
        words += ["--problems", "10", "--n", "4"]
    if not smoke and config.max_completion_length != SamplingConfig.max_completion_length:
        words += ["--max-tokens", f"{config.max_completion_length}"]
    words += _sampling_options(config, embedded)
    words += verifier
    # Both models are evaluated on the weights that the run trained with.
    if config.load_in_4bit:
        words.append("--load-in-4bit")
    # The start model was not trained on this prompt, so the options must name it.
    words += config.prompt.options()
    return f"python -m sage_unsloth {shlex.join(words)}"


def _sampling_options(config: RlvrConfig, embedded: bool) -> list[str]:
    """Sampling options that differ from the defaults.

    For a large model the paper evaluates at another temperature than it trains with, unless the
    run's was changed.
    """
    usual = SamplingConfig()
    temperature = config.temperature
    if not embedded and temperature == RlvrConfig.temperature:
        temperature = usual.temperature
    words: list[str] = []
    for option, value, default in (
        ("--temperature", temperature, usual.temperature),
        ("--top-p", config.top_p, usual.top_p),
        ("--min-p", config.min_p, usual.min_p),
    ):
        if value != default:
            words += [option, f"{value:g}"]
    return words


def training_command(
    out: str | Path,
    config: SftConfig,
    max_length: int,
    *,
    smoke: bool = False,
    data: str | None = None,
    columns: Columns | None = None,
    verifier: Sequence[str] = (),
) -> str:
    """The command that trains by RL on the result of an SFT run.

    Args:
        max_length: of the model's preset; if the run had another one, RL gets its lengths.
        data: custom data; None for the model's default.
        columns: of `data`.
        verifier: `verifier_options`.
    """
    words = ["train", "--algorithm", "sage-branch", "--from", str(out)]
    words += ["--out", str(Path(out).parent / "sage-branch")]
    if smoke:
        words.append("--smoke")
    if backend() == TRL:
        words += ["--backend", TRL]
    if data is not None:
        columns = columns or Columns()
        # RL reads no solutions.
        names = {name: of for name, of in columns.names.items() if name != "solution"}
        words += ["--data", data, *replace(columns, names=names).options()]
        words += ["--split", columns.split] if columns.split else []
    words += verifier
    if config.max_length != max_length:
        # SFT counts prompt and solution together, RL each by itself.
        half = config.max_length // 2
        words += ["--max-prompt-length", f"{half}", "--max-completion-length", f"{half}"]
    return f"python -m sage_unsloth {shlex.join(words)}"


def verifier_options(checker: Checker | None, *, allow_unconfined: bool = False) -> list[str]:
    """Command-line options for a verifier; empty for the default of the data."""
    if checker is None:
        return []
    unconfined = ["--allow-unconfined"] if allow_unconfined else []
    return ["--verifier", checker.name, *unconfined]


COURSE = {
    "reward": ("reward", 3),
    "kl/ref_k3": ("KL", 3),
    "sage/entropy": ("entropy", 3),
    "sage/guide_mean": ("guide", 3),
    "completions/mean_length": ("tokens", 1),
    "completions/clipped_ratio": ("cut", 3),
    "frac_reward_zero_std": ("dead", 3),
    "advantages/dead_groups": ("dead", 3),  # logged where another rule than GRPO's decides
    "seconds": ("s", 1),
}
"""Metric -> title and decimals; all fit into 80 columns."""


def finished_text(out: str | Path, trained: Path) -> str:
    """Printed when a finished run is started again."""
    return (
        f"{out} is finished: {trained}. It is not trained again; its settings and rows are "
        "checked and its results shown. Use another --out for a new run.\n"
    )


def unanswered_share(metrics: Sequence[dict]) -> float | None:
    """The share of completions without a readable answer; None if none was checked."""
    keys = [f"reward/{grade.value}" for grade in Grade]
    graded = [row for row in metrics if all(key in row for key in keys)]
    count = sum(row[key] for row in graded for key in keys)
    if not count:
        return None
    return sum(row[f"reward/{Grade.UNPARSABLE.value}"] for row in graded) / count


def advice(metrics: Sequence[dict], prompt: PromptFormat) -> str:
    """What to do if most answers of the last tenth cannot be read; empty otherwise."""
    share = unanswered_share(metrics[-max(1, len(metrics) // 10) :])
    if share is None or share <= 0.5:
        return ""
    return (
        f"{share:.0%} of the last completions have no readable answer and are never "
        f"rewarded: {answers_remedy(prompt)}. completions.jsonl shows what the model wrote"
    )


def training_curve_rows(metrics: Sequence[dict]) -> list[dict]:
    """First and last tenth of a run, averaged, as rows of a table; unlogged metrics are omitted."""
    tenth = max(1, len(metrics) // 10)
    rows = []
    for part, steps in {"first": metrics[:tenth], "last": metrics[-tenth:]}.items():
        row = {"steps": f"{part} {tenth}"}
        for metric, (title, decimals) in COURSE.items():
            values = [step[metric] for step in steps if metric in step]
            if values:
                row[title] = f"{sum(values) / len(values):.{decimals}f}"
        if (share := unanswered_share(steps)) is not None:
            row["no answer"] = f"{share:.3f}"
        rows.append(row)
    return rows


def outcome(out: Path, metrics: Sequence[dict], prompt: PromptFormat) -> list[str | list[dict]]:
    """Texts and tables of a finished RL run: preflight, first and last tenth, advice."""
    parts: list[str | list[dict]] = []
    preflight = out / PREFLIGHT_FILE
    if preflight.is_file():
        result = json.loads(preflight.read_text(encoding="utf-8"))
        parts += ["\nPreflight, before the first step:"]
        parts += [[{name: f"{result[name]:.3f}" for name in SHARES if name in result}]]
    parts += ["\nTraining:", training_curve_rows(metrics)]
    if result := advice(metrics, prompt):
        parts.append(f"\n{result}.")
    return parts
