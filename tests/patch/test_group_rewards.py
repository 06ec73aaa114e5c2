"""Advantages by another rule inside Unsloth's trainer: each completion gets what the rule makes of
its group's rewards, and the loss is the oracle's.
"""

import copy
import math

import pytest
import torch
from oracle import texts, train_and_check
from test_compositions import (
    BRANCH,
    FOUR_GROUPS,
    OF_REFERENCE,
    SEQUENCE,
    answer_to,
    chance,
    decoded,
    logs,
    lottery,
    nothing_is_right,
    with_answers,
)

from sage_unsloth.methods import group_advantages as rules
from sage_unsloth.methods import group_rewards, kl_reward
from sage_unsloth.methods.advantage_rules import advantage_rule
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.resampling import dynamic_sampling
from sage_unsloth.patch.trained_with import check_resumed
from sage_unsloth.selftest.oracle import score_batch
from sage_unsloth.trainers.trainer_names import ContractError

pytestmark = pytest.mark.usefixtures("unsloth_module")

ACCUMULATED = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}


def every_third(completions, **_):
    """Right or wrong by the text, about a third right."""
    return [float(sum(map(ord, completion[0]["content"])) % 3 == 0) for completion in completions]


def check_advantages(trainer, oracle, reward, rule):
    """Every advantage that was trained on is the rule's, of rewards recomputed from the texts."""
    found = []
    for step in oracle.steps:
        groups = {}
        for inputs in step["inputs"]:
            for prompt, completion, advantage in decoded(trainer, inputs):
                groups.setdefault(prompt, []).append((reward(prompt, completion), advantage))
        assert all(len(group) == trainer.num_generations for group in groups.values())
        for group in groups.values():
            rewards = torch.tensor([[reward for reward, _ in group]])
            expected = rule(rewards)[0].tolist()
            assert [advantage for _, advantage in group] == pytest.approx(expected, abs=1e-5)
            found += expected
    return found


def third_of_text(prompt, completion):
    return float(sum(map(ord, completion)) % 3 == 0)


@pytest.mark.parametrize(
    ("text", "rule", "guide", "settings", "options"),
    [
        ("maxrl", rules.maxrl, BRANCH, {}, {}),
        ("nsr", rules.nsr, None, {"loss_type": "dapo", "mask_truncated_completions": False}, {}),
        ("w-reinforce,weight=0.2", lambda r: rules.w_reinforce(r, weight=0.2), BRANCH, {}, {}),
        (
            "pkpo,k=2",
            lambda r: rules.pkpo(r, k=2),
            BRANCH,
            {"use_bias_correction_kl": True, **ACCUMULATED},
            {},
        ),
        ("maxpo,k=3", lambda r: rules.maxpo(r, k=3), BRANCH, {}, {"kl_estimator": "k2"}),
        (
            "pass-at-k,k=2",
            lambda r: rules.pass_at_k_advantages(r, k=2),
            OF_REFERENCE,
            {"scale_rewards": "batch"},
            {"log_entropy": True},
        ),
        (
            "rs-grpo,beta=2",
            rules.rs_grpo,
            OF_REFERENCE,
            SEQUENCE | {"scale_rewards": "none"},
            {"credit": "sequence"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_trainers_advantages_are_the_rules_and_its_loss_the_oracles(
    make_trainer, text, rule, guide, settings, options
):
    trainer = make_trainer(reward=every_third, max_steps=2, **(FOUR_GROUPS | settings))
    oracle = train_and_check(trainer, guide, advantages=text, **options)
    found = check_advantages(trainer, oracle, third_of_text, rule)
    assert len({round(advantage, 4) for advantage in found}) > 1
    dead = [entry["advantages/dead_groups"] for entry in logs(trainer)]
    assert len(dead) == 2 and all(0 <= share <= 1 for share in dead)
    # The completions table has what was trained on.
    table = torch.tensor([*trainer._logs["advantages"]])
    of_texts = zip(trainer._logs["prompt"], trainer._logs["completion"], strict=True)
    rewards = torch.tensor([third_of_text(None, c[0]["content"]) for _, c in of_texts])
    assert torch.allclose(table, rule(rewards.view(-1, 4)).flatten(), atol=1e-5)


def test_a_group_that_is_all_wrong_teaches_where_the_rule_uses_it(make_trainer):
    def trained(**options):
        trainer = make_trainer(reward=nothing_is_right, max_steps=1, beta=0.0, **FOUR_GROUPS)
        with with_methods(trainer, **options):
            trainer.train()
        (entry,) = logs(trainer)
        assert entry["frac_reward_zero_std"] == 1
        return entry["grad_norm"], entry.get("advantages/dead_groups")

    assert trained() == (0, None)
    gradient, dead = trained(advantages="nsr")
    assert gradient > 0.1 and dead == 0
    gradient, dead = trained(advantages=lambda rewards: rewards - 0.25)
    assert gradient > 0.1 and dead == 0
    assert trained(advantages="maxrl") == (0, 1)


def recorded_scorings(monkeypatch):
    """For each rollout batch: itself, what it was scored as, and the policy's weights then."""
    seen, plain = [], group_rewards.drawn_logps

    def drawn_logps(trainer, batch):
        found = plain(trainer, batch)
        weights = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model).state_dict())
        batch = {k: v.clone() if torch.is_tensor(v) else v for k, v in batch.items()}
        seen.append((batch, found, weights))
        return found

    for module in (group_rewards, kl_reward):
        monkeypatch.setattr(module, "drawn_logps", drawn_logps)
    return seen


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("grpo", {}),
        ("grpo", {"scale_rewards": "none", "loss_type": "dr_grpo", **ACCUMULATED}),
        ("rs-grpo", {"top_entropy_quantile": 0.5}),
    ],
    ids=["grpo", "accumulated", "rs-grpo"],
)
def test_the_kl_is_in_the_reward_and_not_in_the_loss(make_trainer, monkeypatch, text, settings):
    """β is large, so that the KL moves the advantages by more than rounding."""
    trainer = make_trainer(reward=every_third, max_steps=2, beta=0.5, **(FOUR_GROUPS | settings))
    seen = recorded_scorings(monkeypatch)
    train_and_check(trainer, None, kl_in="reward", advantages=text)
    assert len(seen) == 2
    batch, _, weights = seen[-1]
    model = trainer.oracle_model.eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        logps, _ = score_batch(texts(model), batch)
        with model.disable_adapter():
            ref, _ = score_batch(texts(model), batch)
    rewards = torch.tensor([[*trainer._logs["rewards"]["every_third"]]]).double()
    rewards = (rewards - 0.5 * (logps - ref).sum(1)).view(4, 4)
    expected = rules.rs_grpo(rewards) if text == "rs-grpo" else rewards - rewards.mean(1, True)
    if text == "grpo" and "scale_rewards" not in settings:
        expected = expected / (rewards.std(1, keepdim=True) + 1e-4)
    table = torch.tensor([*trainer._logs["advantages"]]).double().view(4, 4)
    torch.testing.assert_close(table, expected, rtol=1e-3, atol=1e-3)
    assert all(entry["kl"] == 0 and entry["kl/ref_k3"] > 1e-4 for entry in logs(trainer))


def test_a_rule_that_counts_does_not_go_with_the_kl_in_the_reward(make_trainer):
    trainer = make_trainer()
    message = r"kl_in='reward' makes rewards of any size, but advantages='maxrl' counts"
    with (
        pytest.raises(ValueError, match=message),
        with_methods(trainer, advantages="maxrl", kl_in="reward"),
    ):
        pass


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}], ids=["scored", "old-logps"])
def test_unlikeliness_ranks_by_the_policy_that_drew(make_trainer, monkeypatch, settings):
    trainer = make_trainer(reward=every_third, max_steps=2, **(FOUR_GROUPS | settings))
    seen = recorded_scorings(monkeypatch)
    train_and_check(trainer, BRANCH, advantages="unlikeliness,weight=0.5")
    assert len(seen) == (1 if settings else 2)
    for batch, found, weights in seen:
        model = trainer.oracle_model.eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            logps, _ = score_batch(texts(model), batch)
        torch.testing.assert_close(found.double(), logps, rtol=0, atol=5e-5)
        assert ("old_per_token_logps" in batch) == bool(settings)
    table = torch.tensor([*trainer._logs["advantages"]]).view(4, 4)
    rewards = torch.tensor([[*map(float, trainer._logs["rewards"]["every_third"])]]).view(4, 4)
    means = seen[-1][1].sum(1) / seen[-1][0]["completion_mask"].sum(1)
    by_rank = rules.unlikeliness(rewards, mean_logps=means.view(4, 4), weight=0.5)
    assert torch.allclose(table, by_rank, atol=1e-5)
    assert len({round(a, 4) for a in table.flatten().tolist()}) > 4  # ranks tell equals apart


def with_truncated(batch):
    """The batch with the tokens of truncated completions in its mask: those up to the last one
    that is not padding (id 1).
    """
    mask = batch["completion_mask"].clone()
    for row, ids in zip(mask, batch["completion_ids"].tolist(), strict=True):
        if not row.any():
            row[: max(i for i, token in enumerate(ids) if token != 1) + 1] = 1
    assert (mask != batch["completion_mask"]).any(), "some are truncated"
    assert batch["completion_mask"].any(), "some are not"
    return batch | {"completion_mask": mask}


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}], ids=["scored", "old-logps"])
def test_unlikeliness_ranks_a_truncated_completion_by_its_own_tokens(
    make_trainer, monkeypatch, settings
):
    """Which are masked in the batch, and would have the mean 0: probability 1."""
    settings = FOUR_GROUPS | settings | {"mask_truncated_completions": True}
    trainer = make_trainer(reward=every_third, max_steps=1, max_completion_length=24, **settings)
    seen = recorded_scorings(monkeypatch)
    with with_methods(trainer, advantages="unlikeliness,weight=0.5"):
        trainer.train()
    (batch, found, weights), model = seen[0], trainer.oracle_model.eval()
    batch = with_truncated(batch)
    model.load_state_dict(weights)
    with torch.no_grad():
        logps, _ = score_batch(texts(model), batch)
    torch.testing.assert_close(found.double(), logps, rtol=0, atol=5e-5)
    rewards = torch.tensor([[*map(float, trainer._logs["rewards"]["every_third"])]]).view(4, 4)
    means = (logps.sum(1) / batch["completion_mask"].sum(1)).view(4, 4)
    expected = rules.unlikeliness(rewards, mean_logps=means, weight=0.5)
    table = torch.tensor([*trainer._logs["advantages"]]).view(4, 4)
    torch.testing.assert_close(table.double(), expected.double(), rtol=0, atol=1e-4)


def test_a_truncated_completion_pays_its_kl_in_the_reward(make_trainer, monkeypatch):
    settings = FOUR_GROUPS | {"mask_truncated_completions": True, "scale_rewards": "none"}
    trainer = make_trainer(
        reward=every_third, max_steps=1, beta=0.5, max_completion_length=24, **settings
    )
    seen = recorded_scorings(monkeypatch)
    with with_methods(trainer, kl_in="reward"):
        trainer.train()
    (batch, _, weights), model = seen[0], trainer.oracle_model.eval()
    batch = with_truncated(batch)
    model.load_state_dict(weights)
    with torch.no_grad():
        logps, _ = score_batch(texts(model), batch)
        with model.disable_adapter():
            ref, _ = score_batch(texts(model), batch)
    rewards = torch.tensor([*trainer._logs["rewards"]["every_third"]]).double()
    rewards = (rewards - 0.5 * (logps - ref).sum(1)).view(4, 4)
    table = torch.tensor([*trainer._logs["advantages"]]).double().view(4, 4)
    torch.testing.assert_close(table, rewards - rewards.mean(1, True), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("outer", ["guide", "sampling"])
def test_dynamic_sampling_replaces_what_the_rule_calls_dead(make_trainer, outer):
    rule = advantage_rule("nsr")
    trainer = with_answers(make_trainer(reward=lottery, max_steps=2, **FOUR_GROUPS))
    contexts = [with_methods(trainer, BRANCH, advantages="nsr"), dynamic_sampling(trainer, 2)]
    first, second = contexts if outer == "guide" else contexts[::-1]
    with first, second:
        trainer.train()
    for entry in logs(trainer):
        # Most groups are all wrong, and teach: none is drawn again.
        assert entry["sampling/resampled_groups"] == entry["sampling/dead_groups"] == 0
        assert entry["frac_reward_zero_std"] > 0 and entry["advantages/dead_groups"] == 0
    assert rule.silent_counts(4) == [4]


def test_a_rule_gets_the_step_and_how_many_there_are(make_trainer):
    steps = []

    def rule(rewards, *, step, max_steps):
        steps.append((step, max_steps))
        return rewards - rewards.mean(1, keepdim=True)

    trainer = make_trainer(reward=every_third, max_steps=3, **FOUR_GROUPS)
    with with_methods(trainer, advantages=rule):
        steps.clear()  # of the checks before training
        trainer.train()
    assert steps == [(0, 3), (1, 3), (2, 3)]


def test_a_group_is_dead_by_the_k_of_its_step(make_trainer):
    trainer = make_trainer(max_steps=5)
    rewards = (torch.arange(4) < torch.arange(5)[:, None]).float().flatten()  # 0 to 4 are right
    first, last = (advantage_rule(f"pkpo,k={k}").silent_counts(4) for k in (3, 1))
    assert first != last
    with with_methods(trainer, advantages="pkpo,k=3,k_last=1"):
        trainer.state.max_steps = 5
        for step, dead in ((0, first), (4, last)):
            trainer.state.global_step = step
            assert group_rewards.dead_groups(trainer, rewards) == dead


def test_groups_are_dead_by_weighted_rewards(make_trainer):
    """They differ only by a reward of weight 0."""
    trainer = make_trainer(
        reward=[nothing_is_right, every_third], reward_weights=[1.0, 0.0], max_steps=1,
        **FOUR_GROUPS,
    )  # fmt: skip
    with dynamic_sampling(trainer, 1):
        trainer.train()
    (entry,) = logs(trainer)
    assert entry["sampling/dead_groups"] == 1 and entry["sampling/resampled_groups"] == 4


def test_what_was_resampled_gets_the_advantages_of_its_own_rewards(make_trainer):
    trainer = with_answers(make_trainer(reward=lottery, max_steps=3, **FOUR_GROUPS))
    oracle = train_and_check(trainer, BRANCH, max_resamples=2, advantages="maxpo,k=3")
    reward = lambda prompt, completion: chance(completion, answer_to(prompt))  # noqa: E731
    found = check_advantages(trainer, oracle, reward, lambda r: rules.maxpo(r, k=3))
    assert any(found)
    entries = logs(trainer)
    assert sum(entry["sampling/resampled_groups"] for entry in entries) > 0
    for entry in entries:
        assert entry["sampling/dead_groups"] == entry["advantages/dead_groups"]


def test_a_reward_that_the_rule_does_not_take_stops_training(make_trainer):
    trainer = make_trainer(max_steps=1)  # its reward is 0 to 4
    with (
        pytest.raises(ValueError, match=r"advantages='maxrl' counts right .* got [2-4]. Use one"),
        with_methods(trainer, advantages="maxrl"),
    ):
        trainer.train()
    assert not {"_generate_and_score_completions", "_calculate_rewards", "_sage_unsloth_groups"} & {
        *vars(trainer)
    }


def test_completions_without_a_reward_get_advantage_0(make_trainer):
    def sometimes(completions, **_):
        contents = [completion[0]["content"] for completion in completions]
        return [None if "k" in text else third_of_text(None, text) for text in contents]

    trainer = make_trainer(reward=sometimes, max_steps=2, **FOUR_GROUPS)
    oracle = train_and_check(trainer, None, advantages="maxrl")
    graded = lambda _, text: math.nan if "k" in text else third_of_text(_, text)  # noqa: E731
    found = check_advantages(trainer, oracle, graded, rules.maxrl)
    assert 0.0 in found and any(found)


def test_evaluation_keeps_the_trainers_own(make_trainer):
    trainer = make_trainer(reward=every_third, max_steps=1, **FOUR_GROUPS)
    with with_methods(trainer, advantages="nsr"):
        found = trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert "eval_loss" in found and not [name for name in found if "dead_groups" in name]
    assert set(trainer._logs["advantages"]) != {0.0, -1.0}


@pytest.mark.parametrize(
    ("change", "advantages", "message"),
    [
        ({}, "pass-at-k,k=4", "k must be a whole number from 1 to 3"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "nsr", "sum_then_normalize"),
        ({}, lambda rewards: 0 * rewards, "the advantage 0, whatever its rewards"),
    ],
)
def test_what_a_rule_does_not_go_with_is_refused(make_trainer, change, advantages, message):
    trainer = make_trainer()
    for name, value in change.items():
        setattr(trainer, name, value)
    with pytest.raises(ValueError, match=message), with_methods(trainer, advantages=advantages):
        pass


def test_dropping_groups_of_equal_rewards_is_refused(make_trainer, monkeypatch):
    monkeypatch.setenv("UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE", "1")
    trainer = make_trainer()
    with (
        pytest.raises(ValueError, match="_EXCLUDE=1 drops"),
        with_methods(trainer, advantages="nsr"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        (
            "_generate_and_score_completions",
            lambda plain: lambda rows: (b := plain(rows)) | {"advantages": b["advantages"].flip(0)},
            "must be those of the rewards",
        ),
        (
            "_generate_and_score_completions",
            lambda plain: lambda rows: {"advantages": torch.zeros(len(rows))},
            "once, for the rewards of all processes",
        ),
        ("_calculate_rewards", lambda plain: lambda *a: plain(*a)[:4].repeat(4, 1) * 2, None),
    ],
    ids=["other-order", "not-graded", "agreeing"],
)
def test_an_unsloth_that_works_otherwise_is_refused(make_trainer, name, broken, message):
    trainer = make_trainer(reward=every_third, max_steps=1, **FOUR_GROUPS)
    setattr(trainer, name, broken(getattr(trainer, name)))
    if message is None:  # other rewards, but the same for TRL and for the rule: that is no defect
        with with_methods(trainer, advantages="rs-grpo"):
            trainer.train()
        return
    with pytest.raises(ContractError, match=message), with_methods(trainer, advantages="nsr"):
        trainer.train()


def test_resuming_with_another_rule_is_refused(make_trainer, tmp_path):
    def run(advantages, resume=None, **options):
        trainer = make_trainer(
            reward=every_third,
            output_dir=str(tmp_path / "run"),
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
            **FOUR_GROUPS,
        )
        with with_methods(trainer, BRANCH, advantages=advantages, **options):
            trainer.train(resume_from_checkpoint=resume)

    run("pkpo,k=2")
    first = str(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(ValueError, match=r"advantages was pkpo,k=2 and is pkpo,k=3"):
        run("pkpo,k=3", first)
    with pytest.raises(ValueError, match=r"advantages was pkpo,k=2 and is the trainer's own"):
        run("grpo", first)
    run("pkpo, k=2", first)


def test_a_rule_that_one_side_alone_records_is_refused():
    plain = {"guide": "None", "beta": 0.05}
    ruled = plain | {"advantages": "nsr"}
    check_resumed(3, {"args": plain}, plain, None)
    for kept, now, message in (
        (plain, ruled, "advantages was the trainer's own and is nsr"),
        (ruled, plain, "advantages was nsr and is the trainer's own"),
    ):
        with pytest.raises(ValueError, match=message):
            check_resumed(3, {"args": kept}, now, None)
