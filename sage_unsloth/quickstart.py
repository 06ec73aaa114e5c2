"""The whole method in minutes on a CPU: SFT, then GRPO and SAGE-Branch (or others), then pass@k.

The embedded arithmetic task and its tiny base model replace DAPO-Math-17K and Qwen2.5-Math-7B.
Stages and evaluation are those of a GPU run: RL uses Unsloth's generated trainer and fast loss,
with LoRA and graded rewards.
"""

import argparse
import json
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_unsloth.evaluation.families import family_report, family_tables, first_and_last_tenth
from sage_unsloth.models.device import frees_models
from sage_unsloth.models.embedded import BASE_MODEL, data_folder, settle_process
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.subsets import over_families
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import environment, open_run
from sage_unsloth.training.figures import plot_training
from sage_unsloth.training.quickstart_plan import UNIT_SECONDS, plan, rl_seconds
from sage_unsloth.training.setting_options import add_processes, add_set
from sage_unsloth.training.side_by_side import Job, choose_processes, run_side_by_side
from sage_unsloth.training.stage import read_metrics

# What loads PyTorch is imported where it is used, since `--help` imports this module.
if TYPE_CHECKING:
    from sage_unsloth.objective.protocols import Guide
    from sage_unsloth.sampling.engines import SamplingConfig
    from sage_unsloth.training.algorithm import Algorithm
    from sage_unsloth.training.rlvr_config import RlvrConfig
    from sage_unsloth.training.sft_stage import SftConfig

QUICKSTART_ALGORITHMS = ("grpo", "sage-branch")
DISPLAY_NAMES = {"grpo": "GRPO", "sage-branch": "SAGE-Branch"}
"""Algorithm -> its name in tables and figures, if different."""
MODEL_NAMES = ("SFT", *DISPLAY_NAMES.values())


def add_quickstart(commands: Any) -> None:
    text = "SFT, GRPO, SAGE-Branch and pass@k on the embedded task"
    parser = commands.add_parser("quickstart", help=text)
    parser.add_argument("--out", default="runs/quickstart", help="folder (default: %(default)s)")
    text = "half a minute; only checks that everything works"
    parser.add_argument("--smoke", action="store_true", help=text)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=list(QUICKSTART_ALGORITHMS),
        metavar="NAME",
        help="algorithms of `train --list` to compare (default: grpo sage-branch)",
    )
    add_set(parser, "RL settings for each of them, such as beta=0.5 max_steps=200")
    add_processes(parser)
    parser.set_defaults(act=_act)


def _act(options: argparse.Namespace) -> int:
    from sage_unsloth.runs.settings import parse_settings
    from sage_unsloth.training.setting_options import naming_options

    config = smoke_config() if options.smoke else QuickstartConfig()
    with naming_options(config.rlvr, by_set=True):
        settings = parse_settings(options.settings, config.rlvr)
        run(options.out, config, options.algorithms, processes=options.processes, **settings)
    return 0


def _embedded_settings() -> Any:
    from sage_unsloth.training import embedded_settings

    return embedded_settings


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """Settings of the stages and the evaluation; `num_problems` held-out ones, None for all."""

    sft: "SftConfig" = field(default_factory=lambda: _embedded_settings().SFT)
    rlvr: "RlvrConfig" = field(default_factory=lambda: _embedded_settings().RLVR)
    sampling: "SamplingConfig" = field(default_factory=lambda: _embedded_settings().SAMPLING)
    num_problems: int | None = None


def smoke_config() -> QuickstartConfig:
    """The same stages at a minimal size; its figures mean nothing."""
    few = {"max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "save_steps": 1}
    return QuickstartConfig(
        sft=replace(_embedded_settings().SFT, max_steps=2),
        rlvr=replace(_embedded_settings().RLVR, **few),
        sampling=replace(_embedded_settings().SAMPLING, num_samples=4, batch_size=16),
        num_problems=4,
    )


@frees_models
def run(
    out: str | Path,
    config: QuickstartConfig | None = None,
    algorithms: Sequence[str] = QUICKSTART_ALGORITHMS,
    *,
    processes: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs or resumes the quickstart in the folder `out`, prints its table, and returns the report.

    Writes `report.json`, `pass_at_k.png`, `training.png` (each with a CSV), `evaluation/` (as
    `compare`), `samples/<model>.jsonl` and the models. A complete folder is only reported.

    Args:
        config: None for the embedded task's own.
        algorithms: rows of `training.algorithms.ALGORITHMS`, in the order of the tables.
        processes: RL runs at a time; None for as many as cores and memory allow. Results do not
            depend on it.
        settings: fields of `RlvrConfig`, which win over the algorithms' and `config.rlvr`'s.

    Raises:
        SideBySideError: one of several runs at a time failed.
        ValueError: an unknown or repeated algorithm, settings that contradict it; the folder holds
            another run's settings, or another process writes to it.
    """
    config = config or QuickstartConfig()
    runs = choose_algorithms(config, algorithms, settings)
    with exclusive_lock(out):
        return _run(Path(out), config, runs, settings, processes)


def _run(
    out: Path,
    config: QuickstartConfig,
    runs: "dict[str, Algorithm]",
    settings: dict[str, Any],
    processes: int | None,
) -> dict[str, Any]:
    """`run` with the folder locked."""
    guides = {name: algorithm.guide for name, algorithm in runs.items()}
    recorded = {name: _guide_record(guide) for name, guide in guides.items()}
    known = {"command": "quickstart", "guides": recorded} | asdict(config)
    given = {key: vars(v) if is_dataclass(v) else v for key, v in settings.items()}
    if given:
        known["set"] = given
    open_run(out, known)
    if (out / "report.json").exists():
        report = read_json(out / "report.json")
        print(f"{out} is complete.\n\n{family_tables(report)}")
        return report
    configs = {n: replace(a.configure(config.rlvr), **settings) for n, a in runs.items()}
    jobs = _jobs(out, configs, guides)
    rl = next(iter(configs.values()))
    left = [job for job in jobs if not job.is_complete]
    count, why = choose_processes(left, processes, long=rl_seconds(rl) > UNIT_SECONDS["start"])
    problems = config.num_problems or len(arithmetic.problems("test"))
    print(plan(out, config.sft, list(runs), rl, config.sampling, problems, count, why))
    seconds, models = _train(out, config, jobs, count)
    rows = over_families(arithmetic.problems("test"), config.num_problems)
    started = time.perf_counter()
    samples = {name: _sample(out, config, rows, name, path) for name, path in models.items()}
    seconds["evaluation"] = time.perf_counter() - started
    report = {"settings": asdict(config) | ({"set": given} if given else {})}
    report |= family_report(rows, samples, asdict(config.sampling), out / "evaluation")
    for file in ("pass_at_k.png", "pass_at_k.csv"):
        (out / "evaluation" / file).replace(out / file)
    report["seconds_this_time"] = {name: round(value, 1) for name, value in seconds.items()}
    logs = {name: read_metrics(out / name.lower(), first=0) for name in runs}
    seed = settings.get("seed", config.rlvr.seed)
    note = f"embedded arithmetic, seed {seed}"
    plot_training(logs, out / "training.png", note)
    trained = {name: [row for row in log if row["step"] > 0] for name, log in logs.items()}
    report["training"] = {name: first_and_last_tenth(log) for name, log in trained.items()}
    report["environment"] = environment()
    write_json(out / "report.json", report)
    print(f"\n{family_tables(report)}\n")
    print(
        f"Written to {out}: report.json, pass_at_k.png, training.png, samples/, evaluation/\n"
        f"Every problem with completions: {out / 'evaluation' / 'comparison.html'}\n"
        f"Next: python -m sage_unsloth {shlex.join(['analyze', str(out)])}"
    )
    return report


def choose_algorithms(
    config: QuickstartConfig, algorithms: Sequence[str], settings: dict[str, Any]
) -> "dict[str, Algorithm]":
    """Display name -> the algorithm, with given and non-default settings."""
    from sage_unsloth.training.algorithms import ALGORITHMS as TABLE
    from sage_unsloth.training.algorithms import SETTINGS, get_algorithm

    if len(set(algorithms)) < len(algorithms) or not algorithms:
        raise ValueError(
            "algorithms must be different rows of `train --list`, at least one, got "
            f"{list(algorithms)}"
        )
    defaults = _embedded_settings().RLVR
    own = {n: getattr(config.rlvr, n) for n in SETTINGS}
    changed = {n: value for n, value in own.items() if value != getattr(defaults, n)}
    rows = [get_algorithm(row) for row in algorithms]
    for row in rows:
        if row.name in TABLE:
            row.check_name(settings)
    rows = [row.with_settings(changed | settings) for row in rows]
    result = {DISPLAY_NAMES.get(row.name, row.name): row for row in rows}
    names = [DISPLAY_NAMES.get(row.name, row.name) for row in rows]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"algorithms of a quickstart must have different names, but {twice!r} is there "
            f"{names.count(twice)} times. Rename one in its file"
        )
    for algorithm in result.values():
        replace(algorithm.configure(config.rlvr), **settings)  # judged before anything is loaded
    return result


def _guide_record(guide: "Guide | None") -> Any:
    from sage_unsloth.training.rlvr_job import recorded_guide

    if guide is None or not is_dataclass(guide):
        return guide and recorded_guide(guide)
    record = {"guide": type(guide).__name__} | asdict(guide)
    try:
        json.dumps(record)
    except TypeError:  # it holds a guide of another kind
        return recorded_guide(guide)
    return record


def _jobs(
    out: Path, configs: "dict[str, RlvrConfig]", guides: "dict[str, Guide | None]"
) -> list[Job]:
    rows = arithmetic.problems("train")
    same = {"model_path": out / "sft" / "model", "rows": rows}
    same["data"] = {"embedded": "arithmetic, split train", "rows": len(rows)}
    return [
        Job(
            name=name,
            work="sage_unsloth.training.rlvr_stage:rlvr",
            arguments=same
            | {"config": config, "folder": out / name.lower(), "guide": guides[name], "name": name},
            folder=out / name.lower(),
            result=out / name.lower() / ("model" if config.full_finetuning else "adapter"),
            max_steps=config.max_steps,
            backend=config.backend,
        )
        for name, config in configs.items()
    ]


def _train(
    out: Path, config: QuickstartConfig, jobs: Sequence[Job], count: int
) -> tuple[dict[str, float], dict[str, Path | None]]:
    """SFT, then the RL runs, `count` at a time: the seconds of each, and the adapters."""
    from sage_unsloth.trainers.backends import load_backend
    from sage_unsloth.training.rlvr_stage import rlvr
    from sage_unsloth.training.sft_stage import sft

    load_backend(jobs[0].backend)
    settle_process()
    seconds, started = {}, time.perf_counter()
    sft(config.sft, data_folder() / BASE_MODEL, arithmetic.problems("sft"), out / "sft")
    models: dict[str, Path | None] = {"SFT": None}
    seconds["SFT"] = time.perf_counter() - started
    if count > 1:
        left = [job for job in jobs if not job.is_complete]
        seconds |= run_side_by_side(left, count, out / "processes")
    for job in jobs:  # one that is complete is only checked
        started = time.perf_counter()
        models[job.name] = rlvr(**job.arguments)
        seconds.setdefault(job.name, time.perf_counter() - started)
    shutil.rmtree(out / "processes", ignore_errors=True)  # of an earlier start that failed
    return seconds, models


def _sample(
    out: Path, config: QuickstartConfig, rows: list[dict], name: str, adapter: Path | None
) -> list[dict]:
    """The graded completions of one model; samples what is missing."""
    from sage_unsloth.models.loading import load_policy
    from sage_unsloth.sampling.engines import TransformersEngine
    from sage_unsloth.sampling.record_sets import sample_and_grade

    file = out / "samples" / f"{name.lower()}.jsonl"
    file.parent.mkdir(exist_ok=True)
    engine = TransformersEngine(*load_policy(out / "sft" / "model", adapter=adapter))
    sampling, source = config.sampling, arithmetic.SOURCE
    return sample_and_grade(sampling, engine, rows, file, model=name, benchmark=source)
