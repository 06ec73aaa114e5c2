"""Reference entropies, teacher log-probabilities and groups: through Unsloth's own scoring, shuffle
and split, against the oracle.
"""

import copy

import pytest
import torch
from conftest import pairs, tiny_model
from oracle import train_and_check

from sage_unsloth.methods.composed import with_methods
from sage_unsloth.objective.guides import BranchGuide, TokenGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.patch.rollout_batch import rollout_signals
from sage_unsloth.patch.unsloth_scoring import (
    OF_LOGITS,
    Scored,
    UnslothScoring,
    _record_scores,
    entropies_of_logits,
    in_layout,
)
from sage_unsloth.trainers.listening import WRAPPED
from sage_unsloth.trainers.trainer_names import SCORERS, ContractError

REFERENCE_GUIDES = {
    "branch": BranchGuide(threshold=1.0, source="reference"),
    "token": TokenGuide(source="reference"),
    "token-causal": TokenGuide(source="reference", norm="causal"),
}


SETTINGS = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "iterations": {"num_iterations": 2},
    "off-policy": {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "mini-batches": {"unsloth_grpo_mini_batch": 4, "temperature": 0.7},
}


@pytest.mark.parametrize(("settings", "guide"), pairs(SETTINGS, REFERENCE_GUIDES))
def test_the_guide_sees_the_reference_after_shuffle_and_split(make_trainer, guide, settings):
    oracle = train_and_check(make_trainer(max_completion_length=24, **settings), guide)
    assert any(
        (log_guide != 0).any().item() for step in oracle.steps for _, _, log_guide in step["guides"]
    )


def test_raw_logits_are_scored_at_the_sampling_temperature(make_trainer):
    """Some models return logits and no hidden states; Unsloth then scores these."""
    from unsloth.models import rl

    trainer = make_trainer(max_completion_length=24, temperature=0.6, max_steps=2)
    setattr(trainer.model.get_base_model(), rl._UNSLOTH_GRPO_HIDDEN_STATES_UNSAFE_ATTR, True)
    oracle = train_and_check(trainer, REFERENCE_GUIDES["branch"])
    values = [signals.ref_entropies for step in oracle.steps for _, signals, _ in step["guides"]]
    assert max(v.max().item() for v in values) > 0.5, "flat logits would show nothing"


def test_the_reference_stays_where_the_policy_goes(make_trainer):
    """A guide of the reference's entropies weighs one text alike before and after training."""
    trainer = make_trainer(max_steps=3, learning_rate=0.05)
    oracle = train_and_check(trainer, REFERENCE_GUIDES["branch"])
    apart = [
        (signals.ref_entropies - signals.entropies)[signals.mask.bool()].abs().mean().item()
        for step in oracle.steps
        for _, signals, _ in step["guides"]
    ]
    assert apart[-1] > apart[0] + 0.01, "the policy must have moved for this to show anything"


def test_nothing_of_the_trainer_stays_replaced(make_trainer):
    import unsloth_zoo.rl_replacements as zoo

    trainer = make_trainer()
    scorers = [name for name in (*SCORERS, OF_LOGITS) if hasattr(zoo, name)]
    before = {name: getattr(zoo, name) for name in scorers}
    with guided_kl(trainer, REFERENCE_GUIDES["branch"]):
        assert "_generate_and_score_completions" in vars(trainer)
        trainer.train()
    assert "_generate_and_score_completions" not in vars(trainer)
    assert "compute_loss" not in vars(trainer)
    assert {name: getattr(zoo, name) for name in scorers} == before


def test_a_guide_of_the_policy_scores_nothing_of_the_rollout(make_trainer):
    """All that is around it is the digest of the weights (`rollout_weights`)."""
    trainer = make_trainer()
    with guided_kl(trainer, BranchGuide()):
        method = vars(trainer)[WRAPPED]["_generate_and_score_completions"]
        assert method.listeners.keys() == {"weights"}
        assert method.own == type(trainer)._generate_and_score_completions.__get__(trainer)


# --- the scorers ---


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", SCORERS)
def test_hidden_states_are_scored_as_before_and_their_entropy_is_right(
    unsloth_module, name, temperature
):
    import unsloth_zoo.rl_replacements as zoo

    if not hasattr(zoo, name):
        pytest.skip(f"this Unsloth has no {name}")

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 7, 16, generator=generator)
    head = torch.randn(29, 16, generator=generator)
    index = torch.randint(0, 29, (3, 7), generator=generator)
    arguments = (hidden, head, index, 4, 0.0, 0.0, 0.0, temperature)
    plain = getattr(zoo, name)(*arguments)
    with _record_scores(True) as calls:
        logps = getattr(zoo, name)(*arguments)
    all_logps = ((hidden @ head.T) / temperature).double().log_softmax(-1)
    expected = -(all_logps.exp() * all_logps).sum(-1)
    assert torch.allclose(logps, plain, atol=1e-6)
    assert len(calls) == 1 and calls[0].logps is logps
    assert torch.allclose(calls[0].entropies.double(), expected, atol=1e-5)
    # As the padded path calls it: by names. One that was dropped would go unnoticed where it is 1.
    names = (
        "chunks",
        "logit_scale_multiply",
        "logit_scale_divide",
        "logit_softcapping",
        "temperature",
    )
    settings = dict(zip(names, (4, 1.5, 2.0, 3.0, temperature), strict=True))
    plain = getattr(zoo, name)(hidden, head, index, **settings)
    with _record_scores(True):
        logps = getattr(zoo, name)(hidden, head, index, **settings)
    assert torch.allclose(logps, plain, atol=1e-6)


@pytest.mark.parametrize("name", SCORERS[:2])
def test_log_probs_over_a_part_of_the_vocabulary_stay_so(unsloth_module, name):
    """UNSLOTH_GRPO_TRUNCATED_SUPPORT: the log-probs are those of the kept set, the entropy is the
    whole vocabulary's.
    """
    import unsloth_zoo.rl_replacements as zoo

    if not hasattr(zoo, name):
        pytest.skip(f"this Unsloth has no {name}")
    generator = torch.Generator().manual_seed(1)
    hidden, head = (
        torch.randn(2, 5, 16, generator=generator),
        torch.randn(29, 16, generator=generator),
    )
    index = (hidden @ head.T).argmax(-1)
    plain = getattr(zoo, name)(hidden, head, index, support_top_k=3)
    with _record_scores(True) as calls:
        logps = getattr(zoo, name)(hidden, head, index, support_top_k=3)
    assert torch.equal(logps, plain)
    assert len(calls) == 1
    all_logps = (hidden @ head.T).log_softmax(-1)
    assert torch.allclose(calls[0].entropies, -(all_logps.exp() * all_logps).sum(-1), atol=1e-5)


def test_entropies_of_logits_by_slices(monkeypatch):
    monkeypatch.setattr("sage_unsloth.patch.unsloth_scoring.ENTROPY_PART", 12)
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]]]).repeat(3, 1, 1)
    found = entropies_of_logits(logits)
    assert found.shape == (3, 2)
    assert torch.allclose(found, torch.tensor([[1.3862944, 0.0]]).repeat(3, 1), atol=1e-6)


# --- the layouts ---

LOGPS = torch.tensor([[-0.5, -1.0, 0.0], [0.0, -0.5, -2.0]])


def test_layout_of_padded_rows():
    calls = [
        Scored(LOGPS[:1], torch.tensor([[1.0, 2.0, 3.0]])),
        Scored(LOGPS[1:], torch.tensor([[4.0, 5.0, 6.0]])),
    ]
    assert in_layout(LOGPS, calls).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_layout_of_padded_rows_after_a_packed_try():
    tried = Scored(torch.full((1, 4), -9.0), torch.full((1, 4), 9.0))
    calls = [tried, Scored(LOGPS, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))]
    assert in_layout(LOGPS, calls).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_layout_of_a_packed_row_that_was_verified_row_by_row():
    packed = Scored(torch.tensor([[-0.5, -1.0, -0.5, -2.0]]), torch.tensor([[1.0, 2.0, 5.0, 6.0]]))
    row = Scored(torch.tensor([[-3.0, -0.5, -1.0]]), torch.tensor([[9.0, 9.0, 9.0]]))
    assert in_layout(LOGPS, [packed, row, row]).tolist() == [[1, 2, 0], [0, 5, 6]]


@pytest.mark.parametrize("values", [[[-0.5, -1.0, -2.0, -0.5]], [[-0.5, -1.0, -0.5]]])
def test_an_unknown_layout_is_refused(values):
    with pytest.raises(ContractError, match="row-major"):
        in_layout(LOGPS, [Scored(torch.tensor(values), torch.zeros(len(values), len(values[0])))])


def test_unsloths_shared_prefix_layout_is_row_major(unsloth_module):
    """PrefixGrouper needs a GPU to run; how it orders the completions' tokens is fixed before
    that.
    """
    from unsloth.utils.prefix_grouper import build_group_layout

    pad = 1
    # Two groups of two; the second group's prompt is a token shorter, so that its rows are shifted
    # left.
    ids = [[7, 8, 5, 6, 9], [7, 8, 4, pad, pad], [3, 5, 5, 5, pad], [3, 9, 9, pad, pad]]
    layout = build_group_layout(
        torch.tensor(ids), 3, pad, 2, torch.tensor([0, 0, 1, 1]), apply_tokr_gate=False
    )
    places = (layout.tgt_rows * 5 + layout.tgt_cols).tolist()
    assert len(places) == 3 + 1 + 3 + 2
    assert places == sorted(places)


# --- refusals ---


def test_a_trainer_without_the_functions_is_refused(make_trainer):
    class Other:
        pass

    with (
        pytest.raises(ContractError, match="_generate_and_score_completions"),
        rollout_signals(Other(), {"ref_entropies"}, scoring=UnslothScoring()),
    ):
        pass


def test_a_scoring_that_is_not_the_references_is_refused(make_trainer):
    trainer = make_trainer()
    original = trainer._generate_and_score_completions

    def replaced(inputs):
        batch = original(inputs)
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"].clone()
        return batch

    trainer._generate_and_score_completions = replaced
    with (
        pytest.raises(ContractError, match="must score the reference"),
        guided_kl(trainer, REFERENCE_GUIDES["branch"]),
    ):
        trainer.train()
    assert trainer._generate_and_score_completions is replaced


def test_groups_that_do_not_stand_side_by_side_are_refused(make_trainer):
    trainer = make_trainer(use_bias_correction_kl=True, gradient_accumulation_steps=1)
    original = trainer._generate_and_score_completions

    def shuffled(inputs):
        batch = original(inputs)
        return {
            k: v[torch.arange(8).roll(1)] if torch.is_tensor(v) and v.dim() else v
            for k, v in batch.items()
        }

    trainer._generate_and_score_completions = shuffled
    with (
        pytest.raises(ContractError, match="side by side"),
        with_methods(trainer, None, kl_estimator="k3-is", credit="sequence"),
    ):
        trainer.train()


# --- the teacher ---


def teacher_model():
    """Another policy on the same base."""
    model = tiny_model(0.0)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_a_teacher_of_its_own_scores_the_batch(make_trainer):
    from sage_unsloth.methods.teacher_guide import TeacherGuide
    from sage_unsloth.trainers.loading import prepare_for_cpu

    model = teacher_model()
    trainer = make_trainer(max_completion_length=24)
    teacher = prepare_for_cpu(copy.deepcopy(model)).eval()
    oracle = train_and_check(trainer, TeacherGuide(), teacher=(teacher, model.double()))
    log_guide = torch.cat([g.flatten() for step in oracle.steps for _, _, g in step["guides"]])
    assert (log_guide > 0).any() and (log_guide < 0).any()


def test_an_adapter_of_the_policy_scores_as_teacher(make_trainer):
    from sage_unsloth.methods.teacher_guide import TeacherGuide

    model = teacher_model()
    trainer = make_trainer(max_completion_length=24)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy.add_adapter("teacher", copy.deepcopy(model.peft_config["default"]))
    weights = {
        n.replace(".default.", ".teacher."): p for n, p in model.named_parameters() if "lora_" in n
    }
    policy.load_state_dict(weights, strict=False)
    policy.set_requires_grad("teacher", False)
    trainer.oracle_model.add_adapter("teacher", copy.deepcopy(model.peft_config["default"]))
    train_and_check(trainer, TeacherGuide(), teacher=("teacher", model.double()))
    assert policy.active_adapters == ["default"]
    assert all(
        p.requires_grad for n, p in policy.named_parameters() if "lora_" in n and ".default." in n
    )


def test_a_checkpoint_holds_the_policys_adapter_alone(make_trainer, tmp_path):
    """With the teacher's beside it transformers would restore that one, and leave the policy as it
    was made.
    """
    from sage_unsloth.methods.teacher_guide import TeacherGuide

    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=1)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy.add_adapter("teacher", copy.deepcopy(policy.peft_config["default"]))
    policy.set_requires_grad("teacher", False)
    with guided_kl(trainer, TeacherGuide(), teacher="teacher"):
        trainer.train()
    trained = {n: p.clone() for n, p in policy.named_parameters() if ".default." in n}
    for name, parameter in policy.named_parameters():
        if ".default." in name:
            torch.nn.init.zeros_(parameter)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert checkpoint.is_dir() and not (checkpoint / "teacher").exists()
    trainer._load_from_checkpoint(str(checkpoint))
    assert all(torch.equal(p, trained[n]) for n, p in policy.named_parameters() if n in trained)
