"""What a study says before it starts, and what it runs: by hand."""

import importlib
import json
import sys
from dataclasses import replace

import pytest

from sage_unsloth.study.plan import Plan, cost_text, plan_text
from sage_unsloth.study.points import parse_claims, parse_methods
from sage_unsloth.study.runner import (
    REDUCED,
    REDUCED_SEEDS,
    check_unchanged,
    name_claims,
    study,
)
from sage_unsloth.study.tasks import get_task, shrink


def make_plan(out, methods=("grpo=0.05,0.1", "maxrl=0.05"), seeds=(1, 2), task=None, **more):
    return Plan(
        task=task or get_task("arithmetic"),
        out=out,
        points=parse_methods(methods),
        seeds=seeds,
        **more,
    )


def test_seed_by_seed_with_the_start_model_first(tmp_path):
    plan = make_plan(tmp_path)
    names = [job.name for job in plan.run_jobs()]
    runs = [f"{point}_seed-{s}" for s in (1, 2) for point in
            ("grpo_beta-0.05", "grpo_beta-0.1", "maxrl_beta-0.05")]  # fmt: skip
    assert names == ["start", *runs]
    assert plan.ks == [1, 4, 8, 16, 32], "n = 64 >= 2k"
    assert plan.run_jobs()[0].arguments["num_samples"] == 256
    early = {job.name: list(job.arguments.get("early", [])) for job in plan.run_jobs()}
    assert early["grpo_beta-0.05_seed-1"] == [13, 25] and early["maxrl_beta-0.05_seed-1"] == []


def test_the_cost_is_said_and_then_measured(tmp_path):
    plan = make_plan(tmp_path)
    jobs = plan.run_jobs()
    steps, completions = plan.amount(jobs)
    assert (steps, completions) == (6 * 50, 100 * (256 + 6 * 64))
    seconds = 300 * 2.5 + completions * 0.011 + 7 * 30
    text = cost_text(plan, jobs, 2)
    minutes = round(seconds / 2 / 60)
    assert f"about {minutes} min, 2 at a time, at the pace of an idle machine" in text
    unknown = replace(plan, task=replace(plan.task, seconds={}))
    assert "estimated after the first run" in cost_text(unknown, jobs, 2)
    (tmp_path / "results").mkdir()
    done = {"point": "grpo beta=0.05", "seconds": {"train": 100.0, "evaluate": 64.0}}
    plan.result("grpo_beta-0.05_seed-1").write_text(json.dumps(done))
    left = [job for job in jobs if not job.is_complete]
    assert len(left) == 6
    seconds = 250 * 2.0 + (100 * (256 + 5 * 64)) * 0.01 + 6 * 30
    text = cost_text(unknown, left, 1)
    assert f"about {round(seconds / 60)} min" in text and "grpo_beta-0.05_seed-1" in text
    assert "3 points x 2 training seeds" in plan_text(plan, 2, "a core for each")


def test_the_reduced_study_of_the_embedded_task_is_an_hour_on_two_cores(tmp_path):
    plan = make_plan(tmp_path, REDUCED, tuple(range(REDUCED_SEEDS)))
    assert "about 1 h 0" in cost_text(plan, [*plan.run_jobs(), *plan.variant_jobs()], 2)


def test_a_claim_cannot_be_taken_back_and_says_when_it_was_named(tmp_path):
    plan = make_plan(tmp_path, task=shrink(get_task("arithmetic")))
    first = parse_claims(["maxrl=0.05>grpo=0.05@4"], plan.points, plan.ks)
    plan.result("").parent.mkdir()
    assert len(name_claims(replace(plan, claims=tuple(first))).claims) == 1
    plan.result("maxrl_beta-0.05_seed-1").write_text("{}")
    later = parse_claims(["start>grpo=0.05@4"], plan.points, plan.ks)
    both = name_claims(replace(plan, claims=tuple(later)))
    assert [claim.text for claim in both.claims] == [first[0].text, later[0].text]
    named = json.loads((tmp_path / "design.json").read_text())["claims"]
    assert [one["runs_complete"] for one in named.values()] == [0, 1]


def test_a_point_that_changed_between_two_calls_is_refused(tmp_path, monkeypatch):
    own = tmp_path / "my_changing_rule.py"
    text = "from sage_unsloth.objective.guides import BranchGuide\nrule = BranchGuide(ratio=0.4)\n"
    own.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "results").mkdir()
    name_claims(make_plan(tmp_path, ["grpo=0.05", "my_changing_rule:rule=0.2"]))
    name_claims(make_plan(tmp_path, ["grpo=0.05", "maxrl=0.05"]))

    def again(text, **options):
        own.write_text(text)
        sys.modules.pop("my_changing_rule")
        importlib.invalidate_caches()
        name_claims(make_plan(tmp_path, ["grpo=0.05", "my_changing_rule:rule=0.2"]), **options)

    again(text.replace("0.4", "0.6"))  # nothing was trained with it
    run = make_plan(tmp_path, ["my_changing_rule:rule=0.2"]).run_jobs()[1].folder
    run.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"guide of 'my_changing_rule:rule beta=0.2' was Branch"):
        again(text.replace("0.4", "0.8"))
    again(text.replace("0.4", "0.8"), check=False)  # a report
    design = json.loads((tmp_path / "design.json").read_text())["points"]
    assert "ratio=0.6" in design["my_changing_rule:rule beta=0.2"]["guide"]


def test_own_code_that_changed_keeps_its_file():
    with pytest.raises(ValueError, match="Restore its file and put new code into another file"):
        check_unchanged("mine:rule beta=0.2", {"code": "advantages 1"}, {"code": "advantages 2"})


def test_each_free_line_is_a_process_of_its_own(tmp_path):
    plan = make_plan(tmp_path, free=("scale",))
    assert [job.name for job in plan.variant_jobs()] == [
        "grpo_beta-0.05_seed-1_free-scale",
        "grpo_beta-0.05_seed-2_free-scale",
    ]
    (job, *_) = make_plan(tmp_path).variant_jobs()
    assert [value for _, value in job.arguments["variants"]] == [13, 25]
    assert job.num_completions == 2 * 64 * 100


def test_a_smoke_run_is_short_whatever_the_task_fixes(tmp_path):
    task = replace(get_task("arithmetic"), common={"max_steps": 300, "learning_rate": 1e-4})
    task = shrink(task)
    plan = make_plan(tmp_path, ["pkpo=8"], task=task)
    assert plan.num_steps(plan.points[0]) == 2 and task.common == {"learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["grop=1"]}, "an algorithm must be one of"),
        ({"seeds": 0}, "--seeds must be >= 1, got 0"),
        ({"free": ["sideways"]}, "--free must be of early, scale, temperature, got sideways"),
        ({"claims": ["maxrl>grpo@8"]}, "a claim must be about the study's points"),
        ({"methods": ["pkpo=16"]}, "k"),
        ({"temperature": 2.0}, "--task has its own data and settings, got temperature with it"),
        ({"data": "mine.jsonl"}, "--task has its own data and settings, got data with it"),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_anything_is_made(tmp_path, options, message):
    words = {"methods": ["grpo=0.05"], "task": "arithmetic"} | options
    with pytest.raises(ValueError, match=message):
        study(tmp_path / "out", **words)
    assert not (tmp_path / "out").exists()


def test_one_seed_and_one_problem_have_no_interval(tmp_path):
    task = get_task("arithmetic")
    benchmark = replace(task.benchmarks[0], rows=task.benchmarks[0].rows[:1])
    with pytest.raises(ValueError, match="at least two problems in each benchmark, got 1 in test"):
        study(
            tmp_path / "out", methods=["grpo"], task=replace(task, benchmarks=(benchmark,)), seeds=1
        )
    assert not (tmp_path / "out").exists()
