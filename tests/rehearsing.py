"""Steps with a rehearsal, and what its gradient must be: for Unsloth's trainer and TRL's own."""

import torch
from transformers import TrainerCallback

from sage_unsloth.methods import rehearsal
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.rehearsal import METRIC, RehearsalRule, Stored, add_rehearsal

COEF = 0.7
STORED = [
    Stored(0, [5, 6, 7], [8, 9, 0]),
    Stored(0, [5, 6, 7], [9, 9, 9, 4, 0]),
    Stored(1, [5, 11], [12, 3, 0]),
    Stored(3, [6, 6, 6, 6, 10], [7, 0]),
]


def run(trainer, *, rule=None, coef=COEF, **options):
    """The gradients before each optimizer step, the rows that were rehearsed, and the weights that
    they were rehearsed with.
    """
    gradients, drawn, weights = [], [], []
    scored = rehearsal.completion_logps

    def recorded(model, rows, temperature):
        if torch.is_grad_enabled():
            drawn.append(rows)
            weights.append({n: p.detach().clone() for n, p in trained(trainer).items()})
        return scored(model, rows, temperature)

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            gradients.append({n: p.grad.clone() for n, p in trained(trainer).items()})

    trainer.add_callback(Keep())
    rehearsal.completion_logps = recorded
    try:
        with add_rehearsal(trainer, STORED, coef=coef, rule=rule), with_methods(trainer, **options):
            trainer.train()
    finally:
        rehearsal.completion_logps = scored
    return gradients, drawn, weights


def trained(trainer):
    return {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}


def expected_gradient(model, weights, rows, rule, temperature):
    """By autograd in float64 on an untouched copy of the model, a completion at a time."""
    model.load_state_dict({n: w.double() for n, w in weights.items()}, strict=False)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert set(named) == set(weights)
    total = 0.0
    for one in rows:
        logps = plain_logps(model, one, temperature)
        with torch.no_grad(), model.disable_adapter():
            reference = plain_logps(model, one, temperature)
        u = (logps - reference).exp()
        per_token = {
            "forward-kl": u - 1 - u.log(),
            "js": u * u.log() - (u + 1) * ((u + 1) / 2).log(),
            "sft": -u.log(),
        }[rule.divergence]
        total = total + per_token.mean() / len(rows)
    return dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True)), total


def plain_logps(model, one, temperature):
    ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
    length = len(one.completion_ids)
    scores = (model(input_ids=ids).logits[0, -length - 1 : -1] / temperature).log_softmax(-1)
    return scores.gather(-1, ids[0, -length:, None])[:, 0]


def check_gradients(make_trainer, divergence, **settings):
    """The gradient with a rehearsal minus that without one is the oracle's, in the first step."""
    rule = RehearsalRule(divergence, batch=3)
    plain = make_trainer(max_steps=1, **settings)
    without, _, _ = run(plain, coef=0)
    trainer = make_trainer(max_steps=1, **settings)
    found, drawn, weights = run(trainer, rule=rule)
    parts = trainer.args.gradient_accumulation_steps
    assert len(drawn) == parts and all(len(rows) == 3 for rows in drawn)
    terms = [
        expected_gradient(trainer.oracle_model, w, rows, rule, trainer.temperature)
        for rows, w in zip(drawn, weights, strict=True)
    ]
    for name, gradient in found[0].items():
        expected = COEF * sum(of_part[name] for of_part, _ in terms) / parts
        difference = gradient - without[0][name]
        torch.testing.assert_close(difference, expected.float(), rtol=1e-4, atol=2e-6)
    assert max(g.abs().max() for of_part, _ in terms for g in of_part.values()) > 1e-3
    (logged,) = [row[METRIC] for row in trainer.state.log_history if METRIC in row]
    mean = sum(value.item() for _, value in terms) / parts
    assert abs(logged - mean) < 1e-5
    losses = [next(r["loss"] for r in t.state.log_history if "loss" in r) for t in (plain, trainer)]
    assert COEF * mean > 1e-3
    assert abs(losses[1] - losses[0] - COEF * mean) < 2e-4, "the logged loss has the term"
    return trainer
