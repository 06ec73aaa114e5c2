"""Are planted bugs noticed? One at a time, in a copy of the repository, by the tests of its room.

    python tests/planted_bugs.py [--rooms patch grading …] [--out FILE]

Each bug is a text of a file, what stands in its place, and the tests that should fail then. Every
text must occur once in its file, or nothing is tried. A bug that is listed in the result with the
same three is not tried again, so the script resumes; after tests were written for a survivor,
`--again survivors` tries it once more. The test that noticed a bug is run without it at once, and
must pass. The result is `data/results/reliability/planted_bugs.json`; `tried` is the day (UTC).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "data" / "results" / "reliability" / "planted_bugs.json"
SECONDS = 900
"""For the tests of one bug; one that makes them hang is noticed."""


class Bug(NamedTuple):
    """`find` occurs once in `file` (below `sage_unsloth/`); `tests` are below `tests/`."""

    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        return self.file.split("/")[0]


GUIDES = ("objective/test_guides.py",)
CREDIT = ("objective/test_sequence_credit.py",)
ROLLOUTS = ("trainers/test_rollout_weights.py",)
SEEDS = ("evaluation/test_intervals.py::test_training_seeds_of_two_models_are_not_paired",)
DEVIATION = ("evaluation/test_metrics.py::test_mean_and_deviation_by_hand",)
SAMPLING = ("sampling/test_sampling.py",)
REWARDS = ("grading/test_rewards.py",)
KEPT = (
    "runs/test_storage.py::test_the_two_newest_are_kept_and_their_sizes_say_that_the_disk_has_them",
)
ANALYSIS = ("analysis/test_analysis.py",)
PLAN = ("planning/test_plan.py", "planning/test_presets.py")
PARITY = (
    "export/test_export.py::test_parity_of_an_exact_merge_is_exact",
    "export/test_export.py::test_parity_refuses_a_model_without_the_adapter",
    "export/test_export.py::test_parity_warns_when_rounding_eats_the_training",
    "export/test_export.py::test_parity_is_of_the_answer_alone",
)
ZEROS = ("export/test_export.py::test_an_adapter_of_zeros_is_refused_and_leaves_nothing",)
BUGS = [
    # --- objective
    Bug(
        "objective/guides.py",
        "noise = _normal_like(signals.policy_logps, generator)",
        "noise = _normal_like(signals.policy_logps, None)",
        GUIDES,
    ),
    Bug(
        "objective/schedule.py",
        "cycle = min(step // length, self.periods - 1)",
        "cycle = step // length",
        GUIDES,
    ),
    Bug(
        "methods/rehearsal.py",
        "ratio * log_ratio - (ratio + 1) * log_mean",
        "ratio * log_ratio - ratio * log_mean",
        ("methods/test_rehearsal.py",),
    ),
    Bug(
        "methods/rehearsal.py",
        "weighted = coef / trainer.current_gradient_accumulation_steps * divergence",
        "weighted = coef * divergence",
        ("methods/test_rehearsed.py",),
    ),
    Bug(
        "methods/rehearsal.py",
        "place[number, :length] = torch.arange(length) + len(one.prompt_ids) - 1",
        "place[number, :length] = torch.arange(length) + len(one.prompt_ids)",
        ("methods/test_rehearsed.py",),
    ),
    Bug(
        "trainers/data_order.py",
        "passes = int(self.trainer.state.epoch or 0)",
        "passes = 0",
        ("trainers/test_data_order.py",),
    ),
    Bug(
        "trainers/data_order.py",
        "return _PassByPass(sampler, trainer) if",
        "return sampler if",
        ("trainers/test_data_order.py",),
    ),
    Bug(
        "methods/penalties.py",
        "return c * (d - 0.5 * c)",
        "return 0.5 * d * d",
        ("objective/test_kl_estimators.py",),
    ),
    Bug(
        "methods/credit.py",
        "mean = (others @ log_guide.sum(-1)) / (others @ tokens).clamp(min=1)",
        "mean = weights @ (log_guide.sum(-1) / tokens.clamp(min=1))",
        CREDIT,
    ),
    Bug(
        "methods/credit.py",
        "factor = (others + 1) / others",
        "factor = (others + 1) / others.clamp(min=2)",
        CREDIT,
    ),
    Bug(
        "methods/adaptive.py",
        "1.0 if state is None else",
        "self.strength if state is None else",
        ("methods/test_adaptive.py",),
    ),
    Bug(
        "objective/surprisal.py",
        "deviation <= 1e-6 * mean.abs()",
        "deviation <= 0",
        ("objective/test_guides.py::test_zscores_of_equal_surprisals_are_all_one_half",),
    ),
    Bug("objective/surprisal.py", "tril(diagonal=first)", "tril(diagonal=first - 1)", GUIDES),
    Bug(
        "methods/group_advantages.py",
        "scored = ~group.isnan()",
        "scored = torch.ones_like(group, dtype=torch.bool)",
        ("patch/test_compositions.py::test_dead_groups_by_hand",),
    ),
    # --- patch
    Bug(
        "patch/scoring.py",
        "1 - capped.float().square()",
        "1 - capped.float().abs()",
        ("patch/test_scoring.py",),
    ),
    Bug(
        "methods/credit.py",
        "trainer.num_generations_eval < 2",
        "trainer.num_generations_eval < 1",
        ("objective/test_sequence_credit.py::test_an_evaluation_of_single_completions_is_refused",),
    ),
    Bug(
        "trainers/finite.py",
        "scaler.get_scale() > 1",
        "scaler.get_scale() >= 1",
        (
            "patch/test_numbers.py"
            "::test_gradients_that_the_scaling_of_fp16_overflows_are_left_to_the_scaler",
        ),
    ),
    Bug(
        "patch/watch.py",
        "if measured is not None and clock is not None:",
        "if measured is None and clock is not None:",
        ("patch/test_guards.py::test_a_step_that_was_interrupted_gets_its_own_noise_again",),
    ),
    Bug(
        "patch/trained_with.py",
        "if before.get(name, NONE) != now.get(name, NONE)",
        "if type(before.get(name, NONE)) is not type(now.get(name, NONE))",
        ("patch/test_guards.py::test_other_choices_are_refused",),
    ),
    Bug("trainers/rollout_weights.py", "name: tensor.clone() for", "name: tensor for", ROLLOUTS),
    Bug(
        "trainers/rollout_weights.py",
        "changed = [name for name in trained if after[name] != before[name]]",
        "changed = [n for n in trained if 'lora_B' in n and after[n] != before[n]]",
        ROLLOUTS,
    ),
    # --- grading
    Bug(
        "grading/tokens.py",
        "LARGEST_EXPONENT = 400",
        "LARGEST_EXPONENT = 4_000",
        ("grading/test_rules.py::test_trees_by_hand",),
    ),
    Bug(
        "grading/expressions.py",
        "DEEPEST = 40",
        "DEEPEST = 400",
        ("grading/test_rules.py::test_trees_by_hand",),
    ),
    Bug(
        "grading/reward.py",
        'turns[-1]["content"]',
        'turns[0]["content"]',
        ("grading/test_rewards.py::test_of_several_messages_the_last_one_is_graded",),
    ),
    Bug(
        "grading/reward.py",
        'Grade(row["grade"]) for row in dropped',
        'Grade(row["grade"]) for row in batch',
        (*REWARDS, "patch/test_compositions.py"),
    ),
    # --- sampling
    Bug(
        "sampling/grading_records.py",
        ' or record["gold"] != gold',
        "",
        SAMPLING,
    ),
    Bug(
        "sampling/counts.py",
        " or not samples.keys() <= set(range(num_samples))",
        "",
        (*SAMPLING, "evaluation/test_evaluate.py"),
    ),
    Bug(
        "sampling/record_sets.py",
        ' and record["sample"] < num_samples',
        "",
        SAMPLING,
    ),
    # --- evaluation
    Bug(
        "evaluation/bootstrap.py",
        "+ np.arange(block)) % count",
        "+ np.arange(block)).clip(max=count - 1)",
        ("evaluation/test_bootstrap.py::test_series_interval_draws_blocks_of_neighbours",),
    ),
    Bug(
        "evaluation/intervals.py",
        "[(variance_of_mean(v)[1], len(v)) for v in (values_a_SP, values_b_SP)]",
        "[(variance_of_mean(values_a_SP - values_b_SP)[1], len(values_a_SP))]",
        SEEDS,
    ),
    Bug("evaluation/metrics.py", "std(ddof=1)", "std(ddof=0)", DEVIATION),
    # --- training
    Bug(
        "training/step_log.py",
        "        del state.log_history[:-1]\n",
        "",
        ("training/test_training.py",),
    ),
    Bug(
        "training/outcomes.py",
        '"last": metrics[-tenth:]',
        '"last": metrics[tenth:]',
        ("training/test_stages.py::test_a_course_is_the_first_and_the_last_tenth",),
    ),
    Bug(
        "training/rlvr_trainer.py",
        "warmup_steps=round(config.warmup_ratio * config.max_steps)",
        "warmup_steps=0",
        ("training/test_rlvr.py::test_every_other_setting_reaches_trainer_adapter_and_unsloth",),
    ),
    Bug(
        "training/rlvr_checks.py",
        " or share % (config.micro_batch_size or 1)",
        "",
        ("training/test_distributed.py::test_what_several_processes_cannot_do_is_refused",),
    ),
    # --- runs
    Bug("runs/checkpoints.py", ", KEPT - 1)", ", KEPT)", KEPT),
    Bug(
        "runs/checkpoints.py",
        'state["global_step"] >= state["max_steps"]',
        'state["global_step"] > state["max_steps"]',
        ("runs/test_records.py",),
    ),
    Bug(
        "runs/files.py",
        '    elif tail:\n        file.write(b"\\n")\n',
        "",
        ("runs/test_records.py",),
    ),
    # --- analysis
    Bug("analysis/patterns.py", "re.compile(text, re.IGNORECASE)", "re.compile(text)", ANALYSIS),
    Bug(
        "analysis/patterns.py",
        "sum(any(e.search(text)",
        "sum(all(e.search(text)",
        ("analysis/test_analysis.py::test_any_expression_of_a_pattern_shows_it",),
    ),
    # --- planning
    Bug("planning/memory.py", "always + max(update, rollouts)", "always + update + rollouts", PLAN),
    Bug(
        "planning/fitting.py",
        "if not set(change) & set(fixed):",
        "if change or not fixed:",
        PLAN,
    ),
    # --- export
    Bug("export/adapter_checks.py", "x[0, start:-1]", "x[0, :-1]", PARITY),
    Bug("export/adapter_checks.py", ' if "lora_B" in n)', ")", ZEROS),
    # --- problems
    Bug(
        "problems/held_out.py",
        'if row["problem"] not in problems]',
        "if row not in chosen]",
        ("problems/test_corpora.py::test_held_out_rows_share_no_problem_with_training",),
    ),
    Bug(
        "problems/overlap.py",
        "_grams(text, min(n, len(text)))",
        "_grams(text, n)",
        ("problems/test_benchmarks.py::test_overlap_by_hand",),
    ),
]


def misplaced(bugs: Sequence[Bug], root: Path = ROOT) -> list[str]:
    """A line for each bug whose text does not occur exactly once in its file."""
    lines = []
    for bug in bugs:
        path = root / "sage_unsloth" / bug.file
        count = path.read_text().count(bug.find) if path.is_file() else "no file; occurs 0"
        if count != 1:
            lines.append(f"{bug.file}: {bug.find!r} must occur once; {count} times")
    return lines


def try_bug(bug: Bug, copy: Path) -> dict:
    """Plant it, run its tests, take it out again; the test that noticed it must pass then."""
    path = copy / "sage_unsloth" / bug.file
    source = path.read_text()
    path.write_text(source.replace(bug.find, bug.replace))
    started = time.perf_counter()
    try:
        by = first_failure([f"tests/{test}" for test in bug.tests], copy)
    except subprocess.TimeoutExpired:
        by = "a test that hangs"
    finally:
        path.write_text(source)
    seconds = round(time.perf_counter() - started)
    if by is not None and "::" in by and first_failure([by.split("[")[0]], copy):
        raise SystemExit(f"{by} fails where nothing is planted, so it has noticed nothing")
    found = {"noticed": by is not None, "by": by, "seconds": seconds}
    return bug._asdict() | found | {"tried": f"{datetime.now(UTC):%Y-%m-%d}"}


def first_failure(tests: Sequence[str], copy: Path) -> str | None:
    """The first of the tests that fails in the copy, or None where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    # 0: all passed; 1: a test failed. Anything else is no verdict.
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout[-2_000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(maxsplit=1)[1].split(" - ")[0] if failed else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", help="folders of the package (default: all)")
    parser.add_argument("--again", choices=("survivors", "all"))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if lines := misplaced(BUGS):
        raise SystemExit("\n".join([*lines, "nothing was tried; bring the list in line"]))
    rows = json.loads(options.out.read_text())["bugs"] if options.out.exists() else []
    known = {(r["file"], r["find"], r["replace"], tuple(r["tests"])): r for r in rows}
    known = {bug: known[bug] for bug in BUGS if bug in known}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes((ROOT / name).read_bytes())
        for bug in tqdm(BUGS, unit="bug"):
            if options.rooms and bug.room not in options.rooms:
                continue
            again = options.again == "all" or (
                options.again and bug in known and not known[bug]["noticed"]
            )
            if bug in known and not again:
                continue
            known[bug] = try_bug(bug, copy)
            found = [known[bug] for bug in BUGS if bug in known]
            noticed = sum(row["noticed"] for row in found)
            record = {"planted": len(found), "noticed": noticed, "bugs": found}
            options.out.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    survivors = [row for row in known.values() if not row["noticed"]]
    print(f"{len(known) - len(survivors)} of {len(known)} planted bugs are noticed")
    for row in survivors:
        print(f"survived: {row['file']}: {row['find']!r} -> {row['replace']!r}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
