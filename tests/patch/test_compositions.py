"""The guide with dynamic sampling, TRL's entropy mask and advantage shaping: inside Unsloth's
trainer, against the oracle.
"""

import hashlib
import math
from types import SimpleNamespace

import pytest
import torch
from oracle import entropy_threshold, train_and_check

from sage_unsloth.grading.checker import Grade, Kind, Verdict
from sage_unsloth.grading.reward import SolutionReward
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.resampling import _Batches, dead_groups, dynamic_sampling
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.trainers.trainer_names import ContractError

pytestmark = pytest.mark.usefixtures("unsloth_module")

BRANCH = BranchGuide(threshold=1.0)
OF_REFERENCE = BranchGuide(threshold=1.0, source="reference")
SEQUENCE = {
    "use_bias_correction_kl": True,
    "gradient_accumulation_steps": 1,
    "loss_type": "dr_grpo",
}
FOUR_GROUPS = {
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "gradient_accumulation_steps": 1,
}
REPLACED = {"_generate_and_score_completions", "_generate", "_calculate_rewards", "compute_loss"}
METRICS = ("sampling/resampled_groups", "sampling/dead_groups")


def entropy_shaped(signals, advantages, alpha=0.4, kappa=2.0):
    """A_t = A + min(α H_t, |A|/κ), (B, T); what stands outside the mask must not matter."""
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    shaped = advantages + torch.minimum(alpha * signals.entropies, advantages.abs() / kappa)
    return torch.where(signals.mask.bool(), shaped, math.nan)


def chance(*texts):
    """1 with probability 1/7, a pure function of the texts."""
    digest = hashlib.blake2b("|".join(texts).encode(), digest_size=4).digest()
    return float(int.from_bytes(digest, "little") % 7 == 0)


def lottery(prompts, completions, answer, **_):
    """Right by chance of completion and answer, so that most groups are dead, and which are cannot
    be foreseen.
    """
    for prompt, gold in zip(prompts, answer, strict=True):
        assert gold == answer_to(prompt[0]["content"]), "the answer must be the prompt's own"
    return [
        chance(completion[0]["content"], gold)
        for completion, gold in zip(completions, answer, strict=True)
    ]


def nothing_is_right(completions, **_):
    return [0.0] * len(completions)


def answer_to(prompt):
    return str(2 * int(prompt.strip("?").split("+")[0]))


def with_answers(trainer, rows=None):
    data = trainer.train_dataset if rows is None else trainer.train_dataset.select(range(rows))
    answers = [answer_to(row["prompt"][0]["content"]) for row in data]
    trainer.train_dataset = data.add_column("answer", answers)
    return trainer


def generated(trainer):
    """The prompts of every call of the trainer's own `_generate`, by optimizer step; put in before
    the context opens.
    """
    calls, plain = {}, trainer._generate

    def _generate(prompts):
        step = calls.setdefault(trainer.state.global_step, [])
        step.append([prompt[0]["content"] for prompt in prompts])
        return plain(prompts)

    trainer._generate = _generate
    return calls


def logs(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def decoded(trainer, inputs):
    """(prompt, completion, advantage) of each row of a micro-batch, as texts."""
    texts = []
    for name in ("prompt", "completion"):
        ids, mask = inputs[f"{name}_ids"], inputs[f"{name}_mask"].bool()
        texts.append(
            [
                trainer.processing_class.decode(row[kept], skip_special_tokens=True)
                for row, kept in zip(ids, mask, strict=True)
            ]
        )
    texts[0] = [
        prompt.replace(" ", "") for prompt in texts[0]
    ]  # decoding puts spaces between tokens
    return list(zip(*texts, inputs["advantages"].tolist(), strict=True))


def check_trained_rows(trainer, oracle):
    """Every advantage is that of its completion, graded against its own prompt, among the others of
    the prompt.
    """
    for entry, step in zip(logs(trainer), oracle.steps, strict=True):
        rows = [row for inputs in step["inputs"] for row in decoded(trainer, inputs)]
        groups = {}
        for prompt, completion, advantage in rows:
            reward = chance(completion, answer_to(prompt))
            groups.setdefault(prompt, []).append((reward, advantage))
        assert all(len(group) == trainer.num_generations for group in groups.values())
        dead = 0
        for group in groups.values():
            rewards = torch.tensor([reward for reward, _ in group])
            expected = rewards - rewards.mean()
            if trainer.scale_rewards == "group":  # which it is not for dr_grpo
                expected = expected / (rewards.std() + 1e-4)
            assert [advantage for _, advantage in group] == pytest.approx(expected.tolist())
            dead += len(set(rewards.tolist())) == 1
        assert entry["sampling/dead_groups"] == dead / len(groups) == entry["frac_reward_zero_std"]
        lengths = torch.cat([i["completion_mask"].sum(-1) for i in step["inputs"]]).double()
        cut = torch.cat([i["completion_mask"][:, -1] for i in step["inputs"]]).double()
        assert entry["completions/mean_length"] == pytest.approx(lengths.mean().item())
        assert entry["completions/min_length"] == lengths.min()
        assert entry["completions/max_length"] == lengths.max()
        assert entry["completions/clipped_ratio"] <= cut.mean() + 1e-6
        assert entry["reward"] == pytest.approx(
            sum(r for g in groups.values() for r, _ in g) / len(rows)
        )


# --- dynamic sampling ---


@pytest.mark.parametrize(
    ("guide", "settings", "options"),
    [
        (BRANCH, {}, {}),
        (
            BRANCH,
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
            {"log_entropy": True},
        ),
        (None, {}, {}),
        (OF_REFERENCE, SEQUENCE, {"credit": "sequence"}),
    ],
    ids=["branch", "branch-accumulation", "no-guide", "reference-sequence"],
)
def test_dead_groups_are_replaced_and_the_loss_is_the_oracles(
    make_trainer, guide, settings, options
):
    trainer = with_answers(make_trainer(reward=lottery, **(FOUR_GROUPS | settings)))
    calls = generated(trainer)
    oracle = train_and_check(trainer, guide, max_resamples=2, **options)
    check_trained_rows(trainer, oracle)
    assert len(calls) == len(oracle.steps) == 4
    for entry, step, of_step in zip(logs(trainer), oracle.steps, calls.values(), strict=True):
        assert len(of_step) <= 3
        again = [prompts[::4] for prompts in of_step[1:]]
        assert entry["sampling/resampled_groups"] == sum(map(len, again))
        assert all(len(prompts) > 0 for prompts in again)
        assert len(of_step) == 3 or entry["sampling/dead_groups"] == 0
        # No prompt twice in a batch, tried or trained on.
        tried = of_step[0][::4] + [prompt for prompts in again for prompt in prompts]
        assert len(tried) == len(set(tried))
        trained = {row[0] for inputs in step["inputs"] for row in decoded(trainer, inputs)}
        assert trained <= set(tried) and len(trained) == 4
    of_runs = [entry["sampling/resampled_groups"] for entry in logs(trainer)]
    assert max(of_runs) > 0 and len(set(of_runs)) > 1, (
        "groups must have died for this to show anything"
    )


def test_a_group_with_a_signal_stays(make_trainer):
    """What was alive in the first generation is trained on as it was generated."""
    trainer = with_answers(make_trainer(reward=lottery, max_steps=2, **FOUR_GROUPS))
    first, plain = {}, trainer._generate

    def _generate(prompts):
        result = plain(prompts)
        if len(prompts) == 16 and trainer.state.global_step not in first:
            first[trainer.state.global_step] = list(zip(prompts, result[3], strict=True))
        return result

    trainer._generate = _generate
    oracle = train_and_check(trainer, BRANCH, max_resamples=1)
    kept = 0
    for number, step in enumerate(oracle.steps):
        trained = {row[:2] for inputs in step["inputs"] for row in decoded(trainer, inputs)}
        pairs = [(p[0]["content"], c[0]["content"]) for p, c in first[number]]
        for group in (pairs[i : i + 4] for i in range(0, 16, 4)):
            alive = len({chance(text, answer_to(prompt)) for prompt, text in group}) > 1
            assert alive == trained.issuperset(group)
            kept += alive
    assert kept > 0


def test_where_no_group_ever_has_a_signal_it_stops(make_trainer):
    trainer = make_trainer(reward=nothing_is_right, max_steps=2, **FOUR_GROUPS)
    calls = generated(trainer)
    with dynamic_sampling(trainer, 3), guided_kl(trainer, OF_REFERENCE):
        trainer.train()
    for entry in logs(trainer):
        assert [entry[name] for name in METRICS] == [12.0, 1.0]
        assert entry["frac_reward_zero_std"] == 1.0
    assert [len(of_step) for of_step in calls.values()] == [4, 4]


@pytest.mark.parametrize("rows", [5, 3])
def test_a_small_dataset_gives_prompts_that_the_batch_has_had(make_trainer, rows):
    trainer = make_trainer(reward=nothing_is_right, max_steps=1, **FOUR_GROUPS)
    trainer.train_dataset = trainer.train_dataset.select(range(rows))
    calls = generated(trainer)
    batches = _Batches(trainer, 1)
    prompts = [repr(row["prompt"]) for row in trainer.train_dataset]
    drawn = batches._draw(4, 0, set(prompts[:2]))
    assert len(drawn) == min(rows, 4)
    fresh = [repr(row["prompt"]) for row in drawn[: rows - 2]]
    assert sorted(fresh) == sorted(prompts[2:])
    if rows == 5:
        with dynamic_sampling(trainer, 1):
            trainer.train()
        (first, second) = calls[0]
        assert len(second) == len(first) == 16
        left = {row["prompt"][0]["content"] for row in trainer.train_dataset} - set(first)
        assert left < set(second)


def test_a_resumed_run_draws_the_same(make_trainer, tmp_path):
    def run(folder, resume=None):
        trainer = make_trainer(
            reward=lottery,
            output_dir=str(folder),
            save_strategy="steps",
            save_steps=2,
            **FOUR_GROUPS,
        )
        calls = generated(with_answers(trainer))
        with guided_kl(trainer, BRANCH), dynamic_sampling(trainer, 2):
            trainer.train(resume_from_checkpoint=resume)
        weights = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
        return calls, weights

    calls, weights = run(tmp_path / "whole")
    again, resumed = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2"))
    assert sorted(again) == [2, 3] and any(len(of_step) > 1 for of_step in again.values())
    assert again == {step: calls[step] for step in again}
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))


def test_every_attempt_and_every_batch_of_a_step_draws_its_own(make_trainer):
    trainer = make_trainer()
    batches = _Batches(trainer, 2)

    def draw(step, number, attempt, seed=3407):
        trainer.args.seed, batches._moment, batches._number = seed, step, number
        return [row["prompt"][0]["content"] for row in batches._draw(6, attempt, set())]

    drawn = [draw(0, 0, 0), draw(0, 0, 1), draw(0, 1, 0), draw(1, 0, 0), draw(0, 0, 0, seed=1)]
    assert drawn[0] == draw(0, 0, 0)
    assert len({tuple(prompts) for prompts in drawn}) == 5


def test_two_rollout_batches_in_one_step(make_trainer):
    trainer = make_trainer(
        reward=nothing_is_right,
        max_steps=1,
        steps_per_generation=1,
        **(FOUR_GROUPS | {"gradient_accumulation_steps": 2}),
    )
    calls = generated(trainer)
    with dynamic_sampling(trainer, 1):
        trainer.train()
    first, first_again, second, second_again = calls[0]
    assert first != second and first_again != second_again
    assert logs(trainer)[0]["sampling/resampled_groups"] == 4.0


class HashGrader:
    """Grades by chance, as the lottery does."""

    label = "chance"

    def extract(self, completion):
        return completion

    def counted_nouns(self, extracted, answers, problems):
        return [""] * len(extracted)

    def judge_answers(self, extracted, answers):
        graded = (chance(*pair) for pair in zip(extracted, answers, strict=True))
        return [Verdict(Grade.CORRECT if right else Grade.WRONG, Kind.TEXT) for right in graded]


def test_counts_and_completions_are_of_what_is_trained_on(make_trainer):
    reward = SolutionReward(HashGrader())
    trainer = with_answers(make_trainer(reward=reward, **FOUR_GROUPS))
    seen, log = [], trainer.log

    def record(entries, *args, **kwargs):
        if "loss" in entries:
            seen.append((reward.pop_counts(), reward.last_batch))
        return log(entries, *args, **kwargs)

    trainer.log = record
    oracle = train_and_check(trainer, BRANCH, max_resamples=2)
    check_trained_rows(trainer, oracle)
    for step, (counts, batch) in zip(oracle.steps, seen, strict=True):
        trained = [row[:2] for inputs in step["inputs"] for row in decoded(trainer, inputs)]
        assert sorted((row["prompt"], row["completion"]) for row in batch) == sorted(trained)
        assert all(row["answer"] == answer_to(row["prompt"]) for row in batch)
        right = sum(chance(completion, answer_to(prompt)) for prompt, completion in trained)
        assert counts == {"correct": right, "wrong": 16 - right, "unparsable": 0, "timed out": 0}
        assert sum(row["grade"] == "correct" for row in batch) == right


def test_columns_that_a_reward_logs_follow(make_trainer):
    def logging(prompts, completions, answer, log_extra, **rest):
        log_extra("text", [completion[0]["content"] for completion in completions])
        if len(completions) < 16:
            log_extra("replaced", ["yes"] * len(completions))
        return lottery(prompts, completions, answer)

    trainer = with_answers(make_trainer(reward=logging, max_steps=1, **FOUR_GROUPS))
    with dynamic_sampling(trainer, 2):
        trainer.train()
    kept = trainer._logs
    texts = [completion[0]["content"] for completion in kept["completion"]]
    assert logs(trainer)[0]["sampling/resampled_groups"] > 0
    assert list(kept["extra"]["text"]) == texts
    assert len(kept["extra"]["replaced"]) == 16 and {*kept["extra"]["replaced"]} == {None, "yes"}
    prompts = [prompt[0]["content"] for prompt in kept["prompt"]]
    expected = [chance(*pair) for pair in zip(texts, map(answer_to, prompts), strict=True)]
    assert list(kept["rewards"]["logging"]) == expected


def test_nothing_is_graded_twice(make_trainer):
    graded = []

    def counting(completions, **rest):
        graded.append(len(completions))
        return lottery(completions=completions, **rest)

    trainer = with_answers(make_trainer(reward=counting, max_steps=3, **FOUR_GROUPS))
    with dynamic_sampling(trainer, 2):
        trainer.train()
    again = sum(entry["sampling/resampled_groups"] for entry in logs(trainer))
    assert sum(graded) == 3 * 16 + 4 * again


def test_evaluation_is_left_alone(make_trainer):
    trainer = make_trainer(reward=nothing_is_right, max_steps=1, **FOUR_GROUPS)
    calls = generated(trainer)
    with dynamic_sampling(trainer, 2):
        result = trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert [len(set(prompts)) for prompts in calls[0]] == [1, 1], (
        "a batch for each prompt, drawn once"
    )
    assert result["eval_frac_reward_zero_std"] == 1.0
    assert not [name for name in result if "resampled" in name]


@pytest.mark.parametrize("outer", ["guide", "sampling"])
def test_either_order_nests_and_is_undone(make_trainer, outer):
    trainer = with_answers(make_trainer(reward=lottery, max_steps=2, **FOUR_GROUPS))
    before = REPLACED & set(vars(trainer))
    contexts = [guided_kl(trainer, OF_REFERENCE), dynamic_sampling(trainer, 2)]
    first, second = contexts if outer == "guide" else contexts[::-1]
    with pytest.raises(KeyError), first, second:
        trainer.train()
        raise KeyError
    assert REPLACED & set(vars(trainer)) == before == set()
    assert all(entry["sampling/resampled_groups"] > 0 for entry in logs(trainer))


def test_off_replaces_nothing(make_trainer):
    trainer = make_trainer()
    with dynamic_sampling(trainer, 0):
        assert "_generate" not in vars(trainer)


def test_what_is_no_training_batch_is_graded_as_the_trainer_would():
    batches = object.__new__(_Batches)
    batches.made = None
    given = (["rows"], ["prompts"], ["completions"], ["ids"])
    assert batches.grade(lambda *values: values, *given) == given


def test_dead_groups_by_hand():
    nan = math.nan
    rewards = torch.tensor([0.0, 0, 0, 1, 1, 1, nan, 2, nan, nan, 3, 4, 7.3, 7.3, 7.3])
    trainer = SimpleNamespace(num_generations=3, state=SimpleNamespace(global_step=0, max_steps=1))
    assert dead_groups(trainer, rewards) == [0, 1, 2, 4]
    rewards[2] = 1.0
    assert dead_groups(trainer, rewards) == [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "max_resamples must be >= 0, got -1"),
        ({"tools": [print]}, r"without tools.*got tools="),
        ({"rollout_func": print}, r"without tools.*rollout_func=<built-in"),
        ({"environment_factories": {None: print}}, r"environments=.*rollout_func"),
        ({"train_dataset": iter([])}, "a length and rows"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "sum_then_normalize"),
    ],
)
def test_what_it_does_not_go_with_is_refused(make_trainer, change, message):
    trainer = make_trainer()
    for name, value in change.items():
        setattr(trainer, name, value)
    with (
        pytest.raises(ValueError, match=message),
        dynamic_sampling(trainer, 1 if change else -1),
    ):
        pass


def test_several_processes_and_images_are_refused(make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match=r"single process.*got 2"), dynamic_sampling(trainer, 1):
        pass
    monkeypatch.undo()
    trainer.train_dataset = trainer.train_dataset.add_column("image", [None] * 32)
    with pytest.raises(ValueError, match=r"text only.*\['image'\]"), dynamic_sampling(trainer, 1):
        pass


def test_nesting_it_in_itself_is_refused(make_trainer):
    trainer = make_trainer()
    with (
        dynamic_sampling(trainer, 1),
        pytest.raises(ContractError, match="'resampling' must not be opened twice"),
        dynamic_sampling(trainer, 1),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        ("_generate", lambda plain: lambda prompts: plain(prompts)[:7], "must return prompt ids"),
        ("_generate", lambda plain: lambda prompts: plain(prompts[:-1]), "must return prompt ids"),
        ("_calculate_rewards", lambda plain: lambda *a: plain(*a)[1:], "a reward for each"),
        (
            "_generate_and_score_completions",
            lambda plain: lambda rows: plain(list(rows)),
            "on to _calculate_rewards",
        ),
        ("_generate_and_score_completions", lambda plain: lambda rows: {}, "once each"),
        (
            "_generate_and_score_completions",
            lambda plain: lambda rows: plain(rows[::4] * 4),
            "side by side",
        ),
    ],
    ids=[
        "fewer-values",
        "fewer-completions",
        "fewer-rewards",
        "other-rows",
        "no-call",
        "mixed-groups",
    ],
)
def test_an_unsloth_that_works_otherwise_is_refused(make_trainer, name, broken, message):
    trainer = make_trainer(max_steps=1, **FOUR_GROUPS)
    setattr(trainer, name, broken(getattr(trainer, name)))
    with pytest.raises(ContractError, match=message), dynamic_sampling(trainer, 1):
        trainer.train()


def test_other_parameters_are_refused(make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(type(trainer), "_generate", lambda self, prompts, images: None)
    with pytest.raises(ContractError, match="these parameters"), dynamic_sampling(trainer, 1):
        pass


# --- TRL's entropy mask ---


@pytest.mark.parametrize(
    ("guide", "settings", "options"),
    [
        pytest.param(None, {}, {}, id="no-guide", marks=pytest.mark.long),
        pytest.param(BRANCH, {}, {}, id="branch"),
        pytest.param(
            BRANCH, {"loss_type": "dapo"}, {"log_entropy": True}, id="dapo", marks=pytest.mark.long
        ),
        pytest.param(
            OF_REFERENCE,
            {},
            {"log_entropy": False},
            id="no-entropies-of-ours",
            marks=pytest.mark.long,
        ),
        pytest.param(
            OF_REFERENCE, {"unsloth_grpo_mini_batch": 4}, {"log_entropy": True}, id="mini-batches"
        ),
        pytest.param(
            BRANCH,
            {"num_iterations": 2},
            {"kl_estimator": "k2"},
            id="k2",
            marks=pytest.mark.long,
        ),
        pytest.param(
            OF_REFERENCE, SEQUENCE, {"credit": "sequence", "log_entropy": False}, id="sequence"
        ),
    ],
)
def test_the_entropy_mask_drops_the_policy_term_alone(make_trainer, guide, settings, options):
    trainer = make_trainer(top_entropy_quantile=0.3, max_completion_length=24, **settings)
    oracle = train_and_check(trainer, guide, **options)
    for step in oracle.steps:
        assert len(step["entropy_masks"]) == len(step["inputs"])
        for kept, inputs in zip(step["entropy_masks"], step["inputs"], strict=True):
            assert 0.29 < (kept.sum() / inputs["completion_mask"].sum()).item() < 0.4
    # The mask has the entropies computed, so they are logged whatever `log_entropy` says.
    assert all(("sage/entropy" in entry) == (guide is not None) for entry in logs(trainer))


def test_the_oracles_threshold_by_hand():
    entropies = torch.tensor([[0.5, 0.1, 9.0], [0.4, 0.3, 0.2]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    # Five tokens, sorted .1 .2 .3 .4 .5: the .6 quantile lies 2.4 steps above .1, the .5 quantile
    # 2.
    assert entropy_threshold(entropies, mask, 0.4).item() == pytest.approx(0.34)
    assert entropy_threshold(entropies, mask, 0.5).item() == pytest.approx(0.3)


# --- an entropy bonus ---


@pytest.mark.parametrize(
    ("guide", "settings", "options"),
    [
        (None, {}, {}),
        (BRANCH, {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2}, {}),
        (OF_REFERENCE, {}, {"kl_estimator": "k2", "log_entropy": True}),
        (None, {"beta": 0.0}, {"log_entropy": True}),
        (BRANCH, {}, {"advantages": "rs-grpo"}),
    ],
    ids=["no-guide", "branch-dr_grpo-accumulation", "k2", "no-kl", "another-rule"],
)
def test_an_entropy_bonus_is_added_to_the_oracles_loss(make_trainer, guide, settings, options):
    """The coefficient is large, so that a bonus without its gradient would be seen."""
    trainer = make_trainer(entropy_coef=0.5, max_steps=2, **settings)
    train_and_check(trainer, guide, **options)


# --- advantage shaping ---


@pytest.mark.parametrize(
    ("guide", "settings", "options"),
    [
        (BRANCH, {}, {}),
        (OF_REFERENCE, {}, {"log_entropy": True}),
        # Slow steps: beyond k3 = 10 Unsloth 2026.10.9 drops the gradient of k3-is otherwise than
        # `kl.k3_is` does.
        (
            OF_REFERENCE,
            SEQUENCE | {"learning_rate": 5e-4},
            {"credit": "sequence", "log_entropy": True},
        ),
        (None, {"loss_type": "dapo"}, {"log_entropy": True}),
    ],
    ids=["branch", "branch-reference", "reference-sequence", "no-guide"],
)
def test_shaped_advantages_equal_the_oracle(make_trainer, guide, settings, options):
    trainer = make_trainer(max_completion_length=24, **settings)
    seen = []

    def shape(signals, advantages):
        seen.append(entropy_shaped(signals, advantages))
        return seen[-1]

    train_and_check(trainer, guide, shape=shape, **options)
    kept = [row[row.isfinite()] for rows in seen for row in rows]
    varied = [(row.max() - row.min()).item() for row in kept if len(row)]
    assert max(varied) > 0.1, "the tokens of a completion must differ for this to show anything"


def test_advantages_of_another_shape_are_refused(make_trainer):
    trainer = make_trainer(max_steps=1)
    with (
        pytest.raises(ValueError, match=r"must return \(B,\) or \(B, T\), got \(1,\)"),
        with_methods(trainer, BRANCH, shape=lambda signals, advantages: advantages[:1]),
    ):
        trainer.train()


# --- all of them ---


@pytest.mark.long
@pytest.mark.parametrize(
    ("guide", "settings", "options"),
    [(BRANCH, {}, {}), (OF_REFERENCE, SEQUENCE, {"credit": "sequence", "log_entropy": True})],
    ids=["branch", "reference-sequence"],
)
def test_the_three_together(make_trainer, guide, settings, options):
    settings = FOUR_GROUPS | settings | {"top_entropy_quantile": 0.3, "max_completion_length": 24}
    trainer = with_answers(make_trainer(reward=lottery, **settings))
    oracle = train_and_check(trainer, guide, max_resamples=2, shape=entropy_shaped, **options)
    check_trained_rows(trainer, oracle)
    assert sum(entry["sampling/resampled_groups"] for entry in logs(trainer)) > 0
