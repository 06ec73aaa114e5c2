"""The whole method in minutes on a CPU: SFT, then GRPO and SAGE-Branch side by side, then pass@k of
each.

The embedded arithmetic task and its tiny base model take the place of DAPO-Math-17K and
Qwen2.5-Math-7B. The functions are those that a GPU run calls, and RL goes through Unsloth's
generated trainer and fast loss, LoRA and graded rewards on either.
"""

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.metrics import Estimate, paired_difference, pass_at_k_interval
from sage_unsloth.models.device import frees_models
from sage_unsloth.models.embedded import BASE_MODEL, data_folder, settle_process
from sage_unsloth.models.loading import load_policy
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.patch.loading import load_unsloth
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment, open_run
from sage_unsloth.sampling.counts import correct_matrix
from sage_unsloth.sampling.engines import SamplingConfig, TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training import embedded_settings
from sage_unsloth.training.figures import plot_training
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import SftConfig, sft
from sage_unsloth.training.stage import read_metrics

# GRPO runs under a guide of 1 (ratio 0): the same loss to the last bits, with its entropy measured
# as well.
ALGORITHMS: dict[str, Guide] = {"GRPO": BranchGuide(ratio=0.0), "SAGE-Branch": BranchGuide()}


MODELS = ("SFT", *ALGORITHMS)


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """Sizes of the quickstart; the nested configs are those of the real stages.

    Attributes:
        sft, rlvr, sampling: settings of each stage.
        num_problems: held-out problems of the evaluation; None takes all.
    """

    sft: SftConfig = embedded_settings.SFT
    rlvr: RlvrConfig = embedded_settings.RLVR
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(
            num_samples=64, temperature=1.0, min_p=0.0, max_completion_length=48, batch_size=512
        )
    )
    num_problems: int | None = None


def smoke_config() -> QuickstartConfig:
    """The same stages at a size that only shows that they run; its figures mean nothing."""
    config = QuickstartConfig()
    return replace(
        config,
        sft=replace(config.sft, max_steps=2),
        rlvr=replace(config.rlvr, max_steps=2, prompts_per_step=2, num_generations=4, save_steps=1),
        sampling=replace(config.sampling, num_samples=4, batch_size=16),
        num_problems=4,
    )


@frees_models
def run(out: str | Path, config: QuickstartConfig | None = None) -> dict[str, Any]:
    """Run or resume the quickstart in the folder `out` and return the report.

    Leaves `report.json`, `pass_at_k.png`, `training.png` (a CSV beside each),
    `samples/<model>.jsonl`, and the trained models. A folder that is complete is only reported.

    Raises:
        ValueError: the folder holds another run's settings, or another process writes to it.
    """
    with locked(out):
        return _run(out, config or QuickstartConfig())


def _run(out: str | Path, config: QuickstartConfig) -> dict[str, Any]:
    """`run` once the folder is this process's own."""
    guides = {
        name: {"guide": type(guide).__name__} | asdict(guide) for name, guide in ALGORITHMS.items()
    }
    out = open_run(out, {"command": "quickstart", "guides": guides} | asdict(config))
    report_path = out / "report.json"
    if report_path.exists():
        report = json.loads(report_path.read_text())
        print(f"{out} is complete.\n\n{summary(report)}")
        return report
    print(plan(config, out))
    load_unsloth()
    settle_process()

    seconds: dict[str, float] = {}
    base = data_folder() / BASE_MODEL
    with _timed(seconds, "SFT"):
        merged = sft(config.sft, base, arithmetic.problems("sft"), out / "sft")
    adapters = {}
    for name, guide in ALGORITHMS.items():
        with _timed(seconds, name):
            folder = out / name.lower()
            adapters[name] = rlvr(
                config.rlvr, merged, arithmetic.problems("train"), folder, guide, name
            )

    rows = spread(arithmetic.problems("test"), config.num_problems)
    trained = {"SFT": None} | adapters
    (out / "samples").mkdir(exist_ok=True)
    samples = {}
    with _timed(seconds, "evaluation"):
        for name, adapter in trained.items():
            model, tokenizer = load_policy(merged, adapter=adapter)
            file = out / "samples" / f"{name.lower()}.jsonl"
            engine = TransformersEngine(model, tokenizer)
            samples[name] = sample_and_grade(
                config.sampling, engine, rows, file, model=name, benchmark=arithmetic.SOURCE
            )

    report = make_report(config, rows, samples)
    report["seconds_this_time"] = {name: round(value, 1) for name, value in seconds.items()}
    metrics = {name: read_metrics(out / name.lower()) for name in ALGORITHMS}
    report["training"] = {name: _training_summary(steps) for name, steps in metrics.items()}
    note = (
        f"{len(rows)} held-out problems, {config.sampling.num_samples} samples each at T = "
        f"{config.sampling.temperature:g}; "
        "bands: 95 % bootstrap over problems; one training seed"
    )
    curves = {title: _curves(report, title) for title in report["pass_at_k"]}
    plot_pass_at_k(curves, out / "pass_at_k.png", note)
    plot_training(
        metrics,
        out / "training.png",
        f"embedded arithmetic, seed {config.rlvr.seed}; thin: each step",
    )
    report["environment"] = environment()
    write_json(report_path, report)
    print(
        f"\n{summary(report)}\n\nWritten to {out}: report.json, pass_at_k.png, training.png, "
        f"samples/"
    )
    return report


def plan(config: QuickstartConfig, out: Path) -> str:
    """What will be done and how long it should take."""
    rlvr_config, sampling = config.rlvr, config.sampling
    problems = config.num_problems or len(arithmetic.problems("test"))
    completions = rlvr_config.prompts_per_step * rlvr_config.num_generations
    total = len(MODELS) * problems * sampling.num_samples
    estimate = (
        SECONDS["start"]
        + config.sft.max_steps * SECONDS["sft_row"] * config.sft.batch_size
        + len(ALGORITHMS) * rlvr_config.max_steps * SECONDS["rollout"] * completions
        + total * SECONDS["sample"]
    )
    return "\n".join(
        [
            f"Quickstart -> {out}",
            f"  1. SFT          {config.sft.max_steps} steps of {config.sft.batch_size} worked "
            f"solutions",
            *(
                f"  {i}. {name:<12} {rlvr_config.max_steps} steps of {completions} completions "
                f"({rlvr_config.prompts_per_step} problems x {rlvr_config.num_generations})"
                for i, name in enumerate(ALGORITHMS, 2)
            ),
            f"  {len(ALGORITHMS) + 2}. pass@k       {len(MODELS)} models x {problems} held-out "
            f"problems x "
            f"{sampling.num_samples} samples = {total:,} completions",
            f"Estimate: {max(1, round(estimate / 60))} min ({MEASURED_ON}); the bars show this "
            f"machine's own pace.",
            "Stop it whenever you like: the step in flight is saved first, and the same command "
            "goes on from there.\n",
        ]
    )


# Seconds of one SFT row, one completion in RL and one in the evaluation, as this program measured
# them (report.json, seconds_this_time), for the plan's estimate.
MEASURED_ON = "as measured on two CPU cores without a GPU, November 2026"


SECONDS = {"start": 30.0, "sft_row": 0.01, "rollout": 0.02, "sample": 0.0065}


def make_report(
    config: QuickstartConfig, rows: list[dict], samples: dict[str, list[dict]]
) -> dict[str, Any]:
    """pass@k with intervals for all problems and each family, paired differences, and how the
    problems were solved.
    """
    n = config.sampling.num_samples
    ks = [2**i for i in range(n.bit_length()) if 2**i <= n]
    present = {row["family"] for row in rows}
    families = [name for name in ("rare", "usual", "both", "far") if name in present]
    groups = {"all problems": np.ones(len(rows), bool)} | {
        f"family: {name}": np.array([row["family"] == name for row in rows]) for name in families
    }
    ids = [row["id"] for row in rows]
    correct = {name: correct_matrix(found, ids, n).sum(axis=1) for name, found in samples.items()}
    report: dict[str, Any] = {
        "settings": json.loads(json.dumps(asdict(config))),
        "num_problems": {title: int(chosen.sum()) for title, chosen in groups.items()},
        "pass_at_k": {
            title: {
                name: {str(k): asdict(pass_at_k_interval(n, counts[chosen], k)) for k in ks}
                for name, counts in correct.items()
            }
            for title, chosen in groups.items()
        },
        "differences": {
            title: {
                f"{a} - {b}": {
                    str(k): asdict(
                        paired_difference(n, correct[a][chosen], n, correct[b][chosen], k)
                    )
                    for k in dict.fromkeys((1, n))
                }
                for a, b in (("GRPO", "SFT"), ("SAGE-Branch", "SFT"), ("SAGE-Branch", "GRPO"))
            }
            for title, chosen in groups.items()
        },
        "behaviour": {name: _behaviour(records) for name, records in samples.items()},
    }
    return report


def _behaviour(records: list[dict]) -> dict[str, Any]:
    routes = Counter(arithmetic.route(record["completion"]) for record in records)
    grades = Counter(record["grade"] for record in records)
    total = len(records)
    return {
        "completions": total,
        "grades": dict(sorted(grades.items())),
        "in_format": sum(record["extracted"] is not None for record in records) / total,
        "finished": sum(record["finish_reason"] == "stop" for record in records) / total,
        "mean_tokens": sum(record["num_tokens"] for record in records) / total,
        "routes": {route: count / total for route, count in routes.most_common()},
    }


def _training_summary(steps: list[dict]) -> dict[str, Any]:
    """First and last tenth of the training log, averaged."""
    tenth = max(1, len(steps) // 10)
    names = (
        "reward",
        "kl",
        "kl/ref_k3",
        "sage/entropy",
        "sage/guide_mean",
        "sage/share_touched",
        "grad_norm",
    )
    return {
        "steps": len(steps),
        "first_tenth": {name: float(np.mean([s[name] for s in steps[:tenth]])) for name in names},
        "last_tenth": {name: float(np.mean([s[name] for s in steps[-tenth:]])) for name in names},
    }


def _curves(report: dict[str, Any], title: str) -> dict[str, dict[int, Estimate]]:
    table = report["pass_at_k"][title]
    return {
        name: {int(k): Estimate(**value) for k, value in curve.items()}
        for name, curve in table.items()
    }


def summary(report: dict[str, Any]) -> str:
    """The report as a table for a terminal, with how to read it."""
    lines = []
    for title, table in report["pass_at_k"].items():
        ks = list(next(iter(table.values())))
        shown = list(dict.fromkeys((ks[0], ks[len(ks) // 2], ks[-1])))
        lines.append(f"{title} ({report['num_problems'][title]})")
        lines.append("  " + f"{'':<13}" + "".join(f"{'pass@' + k:<22}" for k in shown))
        for name, curve in table.items():
            cells = (
                f"{curve[k]['mean']:.3f} [{curve[k]['low']:.3f}, {curve[k]['high']:.3f}]"
                for k in shown
            )
            lines.append("  " + f"{name:<13}" + "".join(f"{cell:<22}" for cell in cells))
        for name, differences in report["differences"][title].items():
            cells = (
                f"pass@{k} {d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"
                for k, d in differences.items()
            )
            lines.append(f"  {name}: " + ", ".join(cells))
        lines.append("")
    ways = list(arithmetic.ROUTES)
    lines.append("ways of working, share of completions")
    lines.append("  " + f"{'':<13}" + "".join(f"{way:<10}" for way in ways) + "in format")
    for name, behaviour in report["behaviour"].items():
        shares = [behaviour["routes"].get(way, 0.0) for way in ways]
        lines.append(
            "  "
            + f"{name:<13}"
            + "".join(f"{share:<10.3f}" for share in shares)
            + f"{behaviour['in_format']:.3f}"
        )
    lines.append("")
    lines.append(
        "Intervals: 95 %, bootstrap over problems, paired for differences. Each method was "
        "trained with one seed,"
    )
    lines.append("so a difference between methods says nothing about other seeds.")
    return "\n".join(line.rstrip() for line in lines)


def spread(rows: list[dict], count: int | None) -> list[dict]:
    """`count` rows spread evenly over the list, so that every family is among them; all of them for
    None.
    """
    if count is None or count >= len(rows):
        return rows
    by_family = sorted(rows, key=lambda row: row["family"])
    return [by_family[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]


class _timed:
    """Adds the seconds spent inside to `seconds[name]`."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds[self.name] = (
            self.seconds.get(self.name, 0.0) + time.perf_counter() - self.start
        )
