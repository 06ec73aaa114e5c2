"""The table of algorithms: its rows, that each row's settings reach Unsloth's trainer, and that
each trains.
"""

import json
import math
from dataclasses import replace
from itertools import groupby

import pytest

from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.penalties import PENALTIES
from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.patch.unsloth_seam import UnslothHook
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import QuickstartConfig, smoke_config
from sage_unsloth.training import rlvr_stage as stage
from sage_unsloth.training.algorithms import (
    ALGORITHMS,
    Algorithm,
    changes,
    get_algorithm,
    listing,
)
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft
from sage_unsloth.training.stage import read_metrics

EXACT = {
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "kl_estimator": "k3-is",
    "credit": "sequence",
}
# Written out once more: a row that changes by accident is noticed here.
EXPECTED = {
    "grpo": {},
    "grpo-no-kl": {"beta": 0.0},
    "grpo-forward-kl": {"kl_estimator": "forward-kl"},
    "grpo-forward-kl-naive": {"kl_estimator": "forward-kl-naive"},
    "grpo-reverse-kl": {"kl_estimator": "k3-is"},
    "sage-random": {"guide": RandomGuide()},
    "sage-token": {"guide": TokenGuide()},
    "sage-branch": {"guide": BranchGuide(ratio=0.3, threshold=1.2)},
    "sage-branch-reference": {"guide": BranchGuide(source="reference")},
    "sage-branch-adaptive": {"guide": AdaptiveGuide(BranchGuide(), target=0.01)},
    "sage-token-causal": {"guide": TokenGuide(norm="causal")},
    "sage-teacher": {"guide": TeacherGuide()},
    "grpo-exact": EXACT,
    "sage-branch-exact": EXACT | {"guide": BranchGuide(source="reference")},
    "sage-token-exact": EXACT | {"guide": TokenGuide(norm="causal", source="reference")},
    "bnpo": {"loss_type": "bnpo"},
    "bnpo-no-kl": {"loss_type": "bnpo", "beta": 0.0},
    "bnpo-sage-branch": {"loss_type": "bnpo", "guide": BranchGuide()},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo-no-kl": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0},
    "dapo-sage-branch": {"loss_type": "dapo", "epsilon_high": 0.28, "guide": BranchGuide()},
    "maxrl": {"advantages": "maxrl"},
    "nsr": {"advantages": "nsr"},
    "w-reinforce": {"advantages": "w-reinforce"},
    "pkpo": {"advantages": "pkpo"},
    "maxpo": {"advantages": "maxpo"},
    "pass-at-k": {"advantages": "pass-at-k"},
    "rs-grpo": {"advantages": "rs-grpo"},
    "unlikeliness": {"advantages": "unlikeliness"},
    "f-grpo": {"advantages": "f-grpo"},
    "ucpo": {"advantages": "ucpo"},
    "clip-cov": {"token_advantages": "clip-cov"},
    "grpo-kl-in-reward": {"kl_in": "reward"},
    "dph-rl": {"beta": 0.0, "rehearsal_coef": 0.3},
    "grpo-sft": {"beta": 0.0, "rehearsal": "sft", "rehearsal_coef": 1.0},
    "grpo-entropy": {"entropy_coef": 0.001},
}
AT_ONCE = ("sage-branch",)
"""Trained on every run of the tests; the others with the long ones."""
NOT_IN_THE_PAPER = {
    "grpo-reverse-kl",
    "bnpo",
    "dapo",
    "sage-branch-reference",
    "sage-branch-adaptive",
    "sage-token-causal",
    "sage-teacher",
    "grpo-exact",
    "sage-branch-exact",
    "sage-token-exact",
    "maxrl",
    "nsr",
    "w-reinforce",
    "pkpo",
    "maxpo",
    "pass-at-k",
    "rs-grpo",
    "unlikeliness",
    "f-grpo",
    "ucpo",
    "clip-cov",
    "grpo-kl-in-reward",
    "dph-rl",
    "grpo-sft",
    "grpo-entropy",
}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo-no-kl", {"beta": 0.1}),
        ("dapo", {"loss_type": "grpo"}),
        ("pkpo", {"advantages": "maxrl"}),
        ("dph-rl", {"rehearsal_coef": 0.0}),
        ("grpo-kl-in-reward", {"kl_in": "loss"}),
        ("grpo-exact", {"scale_rewards": "group"}),
    ],
)
def test_a_setting_that_contradicts_what_a_row_is_is_refused(name, settings):
    (setting,) = settings
    with pytest.raises(ValueError, match=rf"{name} is named for {setting}=.*--algorithm grpo"):
        get_algorithm(name).check_name(settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"beta": 0.0, "loss_type": "dapo", "advantages": "nsr"}),
        ("sage-branch", {"beta": 0.2, "loss_type": "dapo"}),
        ("dapo", {"epsilon_high": 0.3}),
        ("pkpo", {"advantages": "pkpo,k=2"}),
        ("dph-rl", {"rehearsal_coef": 1.0, "rehearsal": "js"}),
        ("grpo-no-kl", {"beta": 0.0}),
    ],
)
def test_a_strength_or_what_a_row_leaves_open_is_set(name, settings):
    row = get_algorithm(name)
    row.check_name(settings)
    changed = row.with_settings(settings)
    assert {key: getattr(changed, key) for key in settings} == settings


def test_rows_are_these():
    assert sorted(ALGORITHMS) == sorted(EXPECTED)
    groups = [name for name, _ in groupby(row.group for row in ALGORITHMS.values())]
    assert len({*groups}) == len(groups), "rows of a group stand together"
    for name, expected in EXPECTED.items():
        algorithm = get_algorithm(name)
        assert algorithm.name == name
        assert changes(algorithm) == expected
        assert (algorithm.paper_row is None) == (name in NOT_IN_THE_PAPER)
        assert algorithm.description and "\n" not in algorithm.description
        if algorithm.loss_type == "dapo":
            for missing in ("dynamic sampling", "overlong shaping"):
                assert missing in algorithm.description
    grpo = ALGORITHMS["grpo"]
    assert (grpo.loss_type, grpo.epsilon_high, grpo.beta, grpo.kl_estimator, grpo.guide) == (
        "grpo",
        0.2,
        0.05,
        "k3",
        None,
    )


def test_configure_changes_the_rows_settings_and_nothing_else():
    config = RlvrConfig(max_steps=7, seed=1, beta=0.5, epsilon_high=0.9, kl_estimator="k2")
    found = ALGORITHMS["dapo-no-kl"].configure(config)
    assert found == RlvrConfig(
        max_steps=7, seed=1, loss_type="dapo", epsilon_high=0.28, beta=0.0, kl_estimator="k3"
    )


def test_an_unknown_name_is_answered_with_the_names():
    with pytest.raises(
        ValueError,
        match=r"one of grpo, .*entropy, or module:name .*got 'SAGE_branch'.* mean 'sage-branch'",
    ):
        get_algorithm("SAGE_branch")
    with pytest.raises(ValueError, match=r"got 'zzz'$"):
        get_algorithm("zzz")


def test_an_algorithm_of_ones_own():
    mine = replace(
        ALGORITHMS["sage-branch"], name="mine", guide=BranchGuide(ratio=0.5), settings={"beta": 0.1}
    )
    assert changes(mine) == {"guide": BranchGuide(ratio=0.5), "beta": 0.1}
    assert changes(mine, ALGORITHMS["sage-branch"]) == changes(mine)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"loss_type": "ppo"}, ValueError, "loss_type must be one of"),
        ({"advantages": "ppo"}, ValueError, "advantages must be one of"),
        ({"kl_in": "value"}, ValueError, "kl_in must be one of"),
        ({"kl_in": "reward", "beta": 0.0}, ValueError, "beta must not be 0"),
        ({"kl_in": "reward", "guide": BranchGuide()}, ValueError, "takes the KL out of the loss"),
        ({"kl_estimator": "k4"}, ValueError, "kl_estimator must be one of"),
        ({"kl_estimator": "k2", "beta": 0.0}, ValueError, "beta must not be 0"),
        ({"guide": BranchGuide(), "beta": 0.0}, ValueError, "beta must not be 0"),
        ({"guide": "branch"}, TypeError, "a guide must have"),
        ({"credit": "sequence"}, ValueError, "kl_estimator must be one of"),
    ],
)
def test_rows_that_cannot_be_are_refused(settings, error, message):
    settings = dict(settings)
    guide = settings.pop("guide", None)
    with pytest.raises(error, match=message):
        Algorithm(name="mine", description="", guide=guide, settings=settings)


def test_an_algorithm_sets_fields_of_the_config_alone():
    with pytest.raises(ValueError, match="must be fields of RlvrConfig, got 'betta' for 'mine'"):
        Algorithm(name="mine", description="", settings={"betta": 0.1})
    row = Algorithm(name="mine", description="", settings={"beta": 0.2, "learning_rate": 1e-3})
    config = row.configure(RlvrConfig(epsilon=0.3))
    assert (config.beta, config.learning_rate, config.epsilon) == (0.2, 1e-3, 0.3)
    assert (row.beta, row.loss_type) == (0.2, "grpo")
    assert row.with_settings({"beta": 0.3, "seed": 1}).settings["beta"] == 0.3


def test_the_listing_names_every_row_and_what_it_changes():
    lines = listing().splitlines()
    starts = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    blocks = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    for (name, algorithm), block in zip(ALGORITHMS.items(), blocks, strict=True):
        text = " ".join(" ".join(block).split())
        assert text.startswith(f"{name} ") and text.endswith(f" {algorithm.description}")
        for key in EXPECTED[name]:
            assert f"{key}=" in text
    assert lines[0].split() == ["grpo", "nothing"]


@pytest.fixture(scope="module")
def merged(tmp_path_factory, unsloth_module):
    """A few steps of SFT: a model that solves some problems, so that there is a gradient."""
    config = replace(QuickstartConfig().sft, max_steps=8)
    rows = arithmetic.problems("sft")
    return sft(config, data_folder() / BASE_MODEL, rows, tmp_path_factory.mktemp("sft"))


@pytest.mark.parametrize(
    "name",
    [n if n in AT_ONCE else pytest.param(n, marks=pytest.mark.long) for n in ALGORITHMS],
)
def test_every_row_trains_with_its_settings(name, merged, unsloth_module, tmp_path, monkeypatch):
    """Two real optimizer steps of the embedded model through `rlvr`; what the trainer was given is
    read off the trainer.
    """
    algorithm, seen = get_algorithm(name), {}
    real = stage.run_trainer

    def watched(trainer, *args, **kwargs):
        seen["args"] = trainer.args
        real(trainer, *args, **kwargs)

    def apply(self, *arguments):
        seen["patched"] = True
        return unpatched(self, *arguments)

    seen["patched"], unpatched = False, UnslothHook.apply
    monkeypatch.setattr(UnslothHook, "apply", apply)
    monkeypatch.setattr(stage, "run_trainer", watched)
    config = replace(
        smoke_config().rlvr,
        learning_rate=5e-3,
        prompts_per_step=4,
        log_entropy=False,
        preflight_prompts=0,
    )
    if name == "sage-teacher":
        config = replace(config, teacher=str(data_folder() / BASE_MODEL))
    settings = algorithm.configure(config)
    if settings.rehearsal_coef:
        settings = replace(settings, rehearsal=f"{settings.rehearsal},problems=10")
    rlvr(settings, merged, arithmetic.problems("train"), tmp_path, algorithm.guide, name)

    args = seen["args"]
    expected = {"loss_type": "grpo", "epsilon_high": 0.2, "beta": 0.05} | EXPECTED[name]
    estimator = expected.pop("kl_estimator", "k3")
    guide = expected.pop("guide", None)
    credit = expected.pop("credit", "token")
    rule = expected.pop("advantages", "grpo")
    of_tokens = expected.pop("token_advantages", "none")
    rehearsed = expected.pop("rehearsal_coef", 0)
    divergence = expected.pop("rehearsal", "forward-kl")
    kl_in = expected.pop("kl_in", "loss")
    assert {key: getattr(args, key) for key in expected} == expected
    assert args.use_bias_correction_kl is (estimator == "k3-is")
    changed = (credit, kl_in, of_tokens) != ("token", "loss", "none")
    assert seen["patched"] == (guide is not None or estimator in PENALTIES or changed)
    assert args.scale_rewards == expected.get("scale_rewards", "group")
    recorded = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert recorded["kl_estimator"] == estimator
    assert recorded["rehearsal_coef"] == rehearsed
    assert recorded["rehearsal"].startswith(divergence)
    assert recorded["guide"] == repr(guide)
    assert recorded["credit"] == credit
    assert recorded["advantages"] == rule
    assert recorded["token_advantages"] == of_tokens

    metrics = read_metrics(tmp_path)
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert ("sage/guide_mean" in row) == (guide is not None)
        assert ("kl/ref_k3" in row) == seen["patched"]
        assert ("sage/credit_abs" in row) == (credit == "sequence")
        assert ("advantages/dead_groups" in row) == (rule != "grpo" or kl_in == "reward")
        assert ("sage/strength" in row) == isinstance(guide, AdaptiveGuide)
    # At step 1 the policy is the reference; the guide's shift of the anchor is all that can be in
    # the kl.
    assert guide is not None or abs(metrics[0]["kl"]) < 1e-7
    if algorithm.beta and kl_in == "loss":
        assert metrics[1]["kl"] > 1e-6
