"""What a person is shown of a finished stage: tables, and the command that comes next."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.models.device import has_gpu
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.sources import SUFFIXES
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.trainers.backends import TRL, backend
from sage_unsloth.training.embedded_settings import SAMPLING
from sage_unsloth.training.preflight import REPORT, SHARES, answers_remedy
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig
from sage_unsloth.training.starting import EMBEDDED, StartingPoint, model_path

HELD_OUT = "HELD_OUT.jsonl"
"""Stands for a file of questions that were not trained on."""


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
    """The command that compares a run's model with what it started from, of a size that fits it.

    For the embedded model as many samples as its quickstart draws; for others the paper's, but a
    few where there is no GPU.

    Args:
        data: of one's own, which the run was trained on. Of a set of the hub the evaluation takes
            the test split; for a file stands `HELD_OUT`, a file of questions that were not
            trained on.
        columns: of `data`.
        eval_file: of the run's held-out curve, which is such a file.
        verifier: the options of the run's, `verifier_options`.
    """
    embedded = point.preset.name == EMBEDDED
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
    if config.load_in_4bit:  # what it started from as well
        words.append("--load-in-4bit")
    words += config.prompt.options()  # for a model that was not trained here
    return f"python -m sage_unsloth {shlex.join(words)}"


def _sampling_options(config: RlvrConfig, embedded: bool) -> list[str]:
    """Sample as the run did; for a large model the paper evaluates at another temperature, unless
    the run's was chosen.
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
    """The command that trains by RL on what an SFT run left.

    Args:
        out: folder of the SFT run.
        config: of the SFT run.
        max_length: of the model's preset; RL gets the lengths of another one that was chosen.
        data: of one's own; None where it is that of the model.
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
        names = {name: of for name, of in columns.names.items() if name != "solution"}
        words += ["--data", data, *replace(columns, names=names).options()]
    words += verifier
    if config.max_length != max_length:
        half = config.max_length // 2
        words += ["--max-prompt-length", f"{half}", "--max-completion-length", f"{half}"]
    return f"python -m sage_unsloth {shlex.join(words)}"


def verifier_options(checker: Checker | None, *, allow_unconfined: bool = False) -> list[str]:
    """The words of a command that ask for a verifier; none for that of the data."""
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
"""Metric -> title and decimals; as on the progress bar, and 80 columns hold them all."""


def finished_text(out: str | Path, trained: Path) -> str:
    """What the command that is started again says of a finished run, before anything is loaded."""
    return (
        f"{out} is finished: {trained}. Nothing is trained again; what follows checks that "
        "settings and rows are those of the run, and shows its outcome. Another --out trains "
        "anew.\n"
    )


def unanswered_share(metrics: Sequence[dict]) -> float | None:
    """The share of completions without an answer that can be read; None where none was checked."""
    keys = [f"reward/{grade.value}" for grade in Grade]
    graded = [row for row in metrics if all(key in row for key in keys)]
    count = sum(row[key] for row in graded for key in keys)
    if not count:
        return None
    return sum(row[f"reward/{Grade.UNPARSABLE.value}"] for row in graded) / count


def advice(metrics: Sequence[dict], prompt: PromptFormat) -> str:
    """What to do where most answers of the last tenth cannot be read; empty where they can."""
    share = unanswered_share(metrics[-max(1, len(metrics) // 10) :])
    if share is None or share <= 0.5:
        return ""
    return (
        f"{share:.0%} of the last completions hold no answer that can be read, and are never "
        f"rewarded: {answers_remedy(prompt)}; completions.jsonl shows what they wrote"
    )


def course(metrics: Sequence[dict]) -> list[dict]:
    """First and last tenth of a run, averaged, as rows of a table; a metric that was not logged is
    left out.
    """
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
    """Texts and tables of a finished RL run: the preflight, where there was one, the first and the
    last tenth of training, and what to do where answers could not be read.
    """
    parts: list[str | list[dict]] = []
    preflight = out / REPORT
    if preflight.is_file():
        result = json.loads(preflight.read_text(encoding="utf-8"))
        parts += ["\nPreflight, before the first step:"]
        parts += [[{name: f"{result[name]:.3f}" for name in SHARES if name in result}]]
    parts += ["\nTraining:", course(metrics)]
    if result := advice(metrics, prompt):
        parts.append(f"\n{result}.")
    return parts
