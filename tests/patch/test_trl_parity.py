"""Three implementations of one loss: Unsloth's trainer, TRL's own, and float64 from texts and
weights alone agree in loss, gradient and metrics.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_trainer, tiny_model
from oracle import completion_rows, credited_advantages, in_completion_layout, score_batch, texts
from trl_parity import REVERSE, RUNS, combinations, everything

from sage_unsloth.methods.penalties import PENALTIES
from sage_unsloth.objective.loss import grpo_loss

TESTS = Path(__file__).parents[1]


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def both(unsloth_module, tmp_path_factory):
    """What each trainer computed; TRL's in a process of its own, meanwhile."""
    folder = tmp_path_factory.mktemp("parity")
    environment = {n: v for n, v in os.environ.items() if not n.startswith("UNSLOTH")}
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), environment.get("PYTHONPATH", "")])
    with open(folder / "trl.log", "w") as log:
        other = subprocess.Popen(
            [sys.executable, str(TESTS / "trl_parity.py"), str(folder)],
            cwd=TESTS.parent,
            env=environment | {"PYTHONPATH": path},
            stdout=log,
            stderr=log,
        )
    try:
        of_unsloth = everything(build_trainer, folder / "unsloth")
        other.wait()
    finally:
        other.kill()
    assert other.returncode == 0, (folder / "trl.log").read_text()[-3000:]
    return of_unsloth, torch.load(folder / "trl.pt", weights_only=True)


@pytest.fixture(scope="module")
def scored():
    """The float64 policy: log-probs of a batch with their graph, of the reference, and what is
    trained.
    """
    model = tiny_model(0.05).double().eval()
    kept = {}

    def of(inputs):
        key = tuple(inputs["prompt_ids"].flatten().tolist())
        if key not in kept:
            with torch.no_grad(), model.disable_adapter():
                ref, _ = score_batch(texts(model), inputs)
            model.requires_grad_(False)
            named = {n: p for n, p in model.named_parameters() if "lora_" in n}
            for parameter in named.values():
                parameter.requires_grad_(True)
            kept[key] = (score_batch(texts(model), inputs)[0], ref, named)
        return kept[key]

    return of


def assert_same(found, expected, tolerance, what):
    """Losses within the tolerance of 0.1 at least, gradients of the largest one."""
    error = abs(found["loss"] - expected["loss"])
    assert error <= tolerance * max(abs(expected["loss"]), 0.1), (what, found, expected)
    assert_same_tensors(found["gradients"], expected["gradients"], tolerance, what)


def assert_same_tensors(found, expected, tolerance, what):
    assert found.keys() == expected.keys()
    scale = max(values.abs().max().item() for values in expected.values())
    assert scale > 0
    for name in expected:
        error = (found[name].double() - expected[name].double()).abs().max().item()
        assert error <= tolerance * scale, f"{what}, {name}: off by {error:.1e} of {scale:.1e}"


def assert_same_metrics(found, expected, what):
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=2e-6), f"{what}, {name}"


def of_oracle(kept, name, scored):
    """Loss and gradients in float64, of what a trainer was given and its guide returned."""
    _, penalty, loss_type, credit = name
    inputs = kept["inputs"]
    logps, ref, named = scored(inputs)
    mask, log_guide, beta = inputs["completion_mask"], kept["log_guide"], 0.05
    if log_guide is not None:
        # TRL's layout is the completions' own.
        same = log_guide.shape == mask.shape
        log_guide = log_guide.double() if same else in_completion_layout(log_guide, inputs)
    advantages = inputs["advantages"].double()
    if credit == "sequence":
        prompts = [prompt.tolist() for prompt, _ in completion_rows(inputs)]
        groups = [prompts.index(prompt) for prompt in prompts]
        advantages = credited_advantages(advantages, logps, ref, mask, log_guide, groups, beta)
    loss = grpo_loss(
        logps,
        ref,
        mask,
        advantages,
        log_guide=log_guide,
        beta=beta,
        loss_type=loss_type,
        kl_estimator=PENALTIES.get(penalty, penalty),
        max_completion_length=12,
    )
    gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
    return {"loss": loss.item(), "gradients": dict(zip(named, gradients, strict=True))}


def assert_agree(of_unsloth, of_trl, names, scored):
    """Both trainers and the oracle, on each combination."""
    for name in names:
        unsloth, trl = of_unsloth[name], of_trl[name]
        for key, values in unsloth["inputs"].items():
            assert torch.equal(values, trl["inputs"][key]), (name, key)
        assert_same(trl, unsloth, 1e-5, name)
        assert_same_metrics(trl["metrics"], unsloth["metrics"], name)
        for kept in (unsloth, trl):
            assert_same(kept, of_oracle(kept, name, scored), 1e-5, name)


def test_every_combination_of_guide_penalty_reduction_and_credit(both, scored):
    names = list(combinations())
    assert len(names) == 4 * (6 * 5 + 4 * len(REVERSE))
    assert_agree(*both, names, scored)


def test_combinations_differ(both):
    """A comparison of what nothing reaches would hold too."""
    found, names = both[1], combinations()
    losses = {}
    for name in names:
        losses.setdefault(round(found[name]["loss"], 7), []).append(name)
    # q = 1 on the policy's side is one loss for bnpo and dapo of one micro-batch.
    assert all(len({name[0] for name in same}) == 1 for same in losses.values()), losses


@pytest.mark.parametrize("name", RUNS)
def test_training_runs(both, name):
    unsloth, trl = (of[name] for of in both)
    assert len(unsloth["rows"]) == len(trl["rows"]) == 2
    for step, (a, b) in enumerate(zip(trl["rows"], unsloth["rows"], strict=True)):
        assert_same_metrics(a, b, (name, step))
    # The second step's, and the weights, are after an update that the first one's decided.
    for step, (a, b) in enumerate(zip(trl["gradients"], unsloth["gradients"], strict=True)):
        assert_same_tensors(a, b, 1e-5, (name, step))
