"""Trains Unsloth's trainer, or TRL's own in a process without Unsloth, for a few steps and
compares every optimizer step with the plain-torch loss.

The oracle's log-probabilities, reference log-probabilities and entropies come from one unpadded
forward per completion through a float64 copy of the model. From the path under test it takes the
batch, the log-probabilities at sampling time and what the guide returned; what the guide was shown
is compared with the oracle's own.
"""

import math
import sys
from importlib import metadata

import torch
from packaging.version import Version
from transformers import TrainerCallback

from sage_unsloth.methods.penalties import PENALTIES
from sage_unsloth.objective.kl import UNSLOTH_K3_MAX, k3
from sage_unsloth.objective.loss import grpo_loss
from sage_unsloth.objective.protocols import SteeredGuide
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.selftest.oracle import completion_rows, score_batch, to_completion_layout

# Unsloth up to 2026.10.7 divides bnpo by the token count of the whole generation batch, later by
# the micro-batch's own.
OLD = Version(metadata.version("unsloth_zoo")) <= Version("2026.10.7")
WHOLE_BATCH_LOSSES = ("dapo", "bnpo") if OLD else ("dapo",)


def without_unsloth():
    """Whether the trainer is TRL's own."""
    return "unsloth" not in sys.modules


def whole_batch_losses():
    return ("dapo",) if without_unsloth() else WHOLE_BATCH_LOSSES


def in_completion_layout(values, inputs):
    """(B, T) float64 of the trainer's layout, 0 outside the mask; TRL's is that of the
    completions.
    """
    if not without_unsloth():
        return to_completion_layout(values, inputs)
    return torch.where(inputs["completion_mask"].bool(), values.double(), 0.0)


class Recording:
    """A guide that keeps what it was shown and what it returned, one entry per micro-batch."""

    def __init__(self, guide):
        self.guide = guide
        self.needs = guide.needs
        self.causal = getattr(guide, "causal", False)
        self.calls = []

    def log_guide(self, signals, *, step, max_steps, generator=None):
        result = self.guide.log_guide(signals, step=step, max_steps=max_steps, generator=generator)
        self.calls.append(
            {"signals": signals, "log_guide": result, "step": step, "max_steps": max_steps}
        )
        return result


class SteeredRecording(Recording):
    """The same of a guide with a state."""

    def after_step(self, metrics):
        self.guide.after_step(metrics)

    def state(self):
        return self.guide.state()

    def restore(self, state):
        self.guide.restore(state)


def texts(model):
    """The logits of one text, (length,) token ids, by a transformers model."""
    return lambda ids: model(input_ids=ids[None], use_cache=False).logits[0]


def credited_advantages(advantages, logps, ref, mask, log_guide, groups, beta):
    """What credit="sequence" makes of the advantages, (B, T), by loops over completions and
    tokens.
    """
    logps, result = logps.detach(), torch.zeros(mask.shape, dtype=torch.float64)
    lengths = mask.sum(-1).tolist()

    def earned_after(row, t, mean):
        total = 0.0
        for later in range(t + 1, lengths[row]):
            d = ref[row, later] - logps[row, later]
            total -= min(d.exp() - d - 1, UNSLOTH_K3_MAX)  # bounded, as the credit is
            if log_guide is not None:
                total += log_guide[row, later] - mean
        return beta * total

    for i, group in enumerate(groups):
        others = [j for j, other in enumerate(groups) if other == group and j != i]
        tokens, mean = sum(lengths[j] for j in others), 0.0
        if log_guide is not None and tokens:
            mean = sum(log_guide[j, : lengths[j]].sum() for j in others) / tokens
        for t in range(lengths[i]):
            baseline = sum(earned_after(j, t, mean) for j in others) / len(others)
            own = advantages[i] if advantages.dim() == 1 else advantages[i, t]
            own = own * (len(others) + 1) / len(others)
            result[i, t] = own + earned_after(i, t, mean) - baseline
    return result


def entropy_threshold(entropies, mask, quantile):
    """What a micro-batch's entropy must reach to be in its top `quantile`: between two tokens', in
    proportion.
    """
    ordered = entropies[mask.bool()].sort().values
    place = (1 - quantile) * (len(ordered) - 1)
    low = ordered[math.floor(place)]
    return low + (place - math.floor(place)) * (ordered[math.ceil(place)] - low)


class Oracle(TrainerCallback):
    """At each optimizer step, before the weights move: the gradient of the plain-torch loss, beside
    the trainer's.
    """

    def __init__(
        self,
        trainer,
        recording=None,
        kl_estimator="k3",
        credit="token",
        teacher=None,
        shape=None,
        advantages="grpo",
        kl_in="loss",
        k3_bounded=None,
    ):
        bounded = not without_unsloth() if k3_bounded is None else k3_bounded
        self.k3_max = UNSLOTH_K3_MAX if bounded else None
        self.beta = trainer.beta if kl_in == "loss" else 0.0
        self.own_baseline = advantages != "grpo"
        self.trainer = trainer
        self.shape = shape
        self.credit = credit
        self.teacher = teacher
        self.kl_estimator = kl_estimator
        self.recording = recording
        self.inputs = []
        self.losses = []
        self.steps = []
        self.entropy_masks = []
        original, of_trl = trainer.compute_loss, trainer.get_high_entropy_mask

        def get_high_entropy_mask(*args):
            self.entropy_masks.append(of_trl(*args))
            return self.entropy_masks[-1]

        def compute_loss(model, inputs, *args, **kwargs):
            self.inputs.append(
                {k: v.clone() if torch.is_tensor(v) else v for k, v in inputs.items()}
            )
            loss = original(model, inputs, *args, **kwargs)
            self.losses.append(loss.item())
            return loss

        trainer.compute_loss = compute_loss
        trainer.get_high_entropy_mask = get_high_entropy_mask
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = self.trainer.oracle_model.eval()
        model.load_state_dict(
            self.trainer.accelerator.unwrap_model(self.trainer.model).state_dict()
        )
        named = {n: p for n, p in model.named_parameters() if "lora_" in n and ".teacher." not in n}
        total = torch.zeros((), dtype=torch.float64)
        calls = self.recording.calls if self.recording else [None] * len(self.inputs)
        assert len(calls) == len(self.inputs)
        guides, kls, masks = [], [], list(self.entropy_masks)
        for inputs, call in zip(self.inputs, calls, strict=True):
            with torch.no_grad(), model.disable_adapter():
                ref, ref_entropies = score_batch(texts(model), inputs, args.temperature)
            teacher = None
            if self.teacher is not None:
                with torch.no_grad():
                    teacher, _ = score_batch(texts(self.teacher), inputs, args.temperature)
            model.requires_grad_(False)
            for parameter in named.values():
                parameter.requires_grad_(True)
            logps, entropies = score_batch(texts(model), inputs, args.temperature)
            mask = inputs["completion_mask"]
            log_guide = None
            of_oracle = TokenSignals(
                logps.detach(), ref, mask, entropies.detach(), ref_entropies, teacher
            )
            if call is not None:
                assert torch.equal(
                    in_completion_layout(call["signals"].mask, inputs).bool(), mask.bool()
                )
                log_guide = in_completion_layout(call["log_guide"], inputs)
                _compare_signals(call["signals"], inputs, of_oracle)
                guides.append((call, of_oracle, log_guide))
            old = inputs.get("old_per_token_logps")
            if old is not None:
                old = in_completion_layout(old, inputs)
            advantages = inputs["advantages"].double()
            if self.shape is not None:
                advantages = self.shape(of_oracle, advantages)
                if advantages.dim() == 2:
                    advantages = torch.where(mask.bool(), advantages, 0.0)
            if self.credit == "sequence":
                prompts = [prompt.tolist() for prompt, _ in completion_rows(inputs)]
                groups = [prompts.index(prompt) for prompt in prompts]
                beta = self.trainer.beta
                if self.own_baseline:  # what `credited_advantages` makes of TRL's is taken back
                    size = self.trainer.num_generations
                    advantages = advantages * (size - 1) / size
                advantages = credited_advantages(
                    advantages, logps, ref, mask, log_guide, groups, beta
                )
            if args.top_entropy_quantile < 1.0:
                kept = self._entropy_mask(inputs, entropies.detach(), masks.pop(0))
                # An advantage of 0 leaves the token's KL and the normaliser as they are.
                advantages = (advantages if advantages.dim() == 2 else advantages[:, None]) * kept
            loss = grpo_loss(
                logps,
                ref,
                mask,
                advantages,
                old_per_token_logps=old,
                log_guide=log_guide,
                beta=self.beta,
                epsilon=self.trainer.epsilon_low,
                epsilon_high=self.trainer.epsilon_high,
                loss_type=args.loss_type,
                importance_sampling_level=args.importance_sampling_level,
                kl_estimator=PENALTIES.get(self.kl_estimator, self.kl_estimator),
                k3_max=self.k3_max,
                max_completion_length=args.max_completion_length,
                num_items_in_batch=_tokens_per_optimizer_step(inputs, args),
            )
            if args.entropy_coef:
                bonus = (entropies * mask).sum() / mask.sum()
                total = total - args.entropy_coef * bonus / args.gradient_accumulation_steps
            kls.append(_mean_penalty(self.kl_estimator, logps, ref, log_guide, mask, self.k3_max))
            # A mean within the micro-batch is averaged over them; a division by the token count of
            # the whole generation batch is already a sum over them.
            total = total + loss / (
                1 if args.loss_type in whole_batch_losses() else args.gradient_accumulation_steps
            )
        expected = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        found = dict(self.trainer.model.named_parameters())
        gradients = {
            name: (found[name].grad.double(), torch.zeros_like(named[name]) if g is None else g)
            for name, g in zip(named, expected, strict=True)
        }
        self.steps.append(
            {
                "loss": sum(self.losses),
                "expected_loss": total.item(),
                "gradients": gradients,
                "guides": guides,
                "inputs": self.inputs,
                "expected_kl": sum(kls) / len(kls),
                "entropy_masks": self.entropy_masks,
            }
        )
        assert not masks
        self.inputs, self.losses, self.entropy_masks = [], [], []
        if self.recording:
            self.recording.calls = []

    def _entropy_mask(self, inputs, entropies, of_trl):
        """TRL's mask, (B, T), which is the oracle's own but for ties: a prompt's completions share
        the entropy of their first token, up to rounding, and the threshold may fall on it."""
        of_trl, mask = in_completion_layout(of_trl, inputs), inputs["completion_mask"].bool()
        threshold = entropy_threshold(entropies, mask, self.trainer.args.top_entropy_quantile)
        clear = mask & ((entropies - threshold).abs() > 1e-4)
        assert torch.equal(of_trl[clear], (entropies > threshold)[clear].double())
        assert clear.sum() >= 0.9 * mask.sum()
        return of_trl

    def check(self, rtol=1e-5):
        """Loss and every gradient within rtol of the oracle, relative to the largest gradient of
        its step.

        The loss is a sum of terms of about 1 that nearly cancel, so it is compared on the scale of
        0.1 at least.
        """
        assert self.steps
        for step in self.steps:
            error, scale = (
                abs(step["loss"] - step["expected_loss"]),
                max(abs(step["expected_loss"]), 0.1),
            )
            assert error <= rtol * scale, f"loss {step['loss']}, expected {step['expected_loss']}"
            scale = max(expected.abs().max().item() for _, expected in step["gradients"].values())
            for name, (found, expected) in step["gradients"].items():
                error = (found - expected).abs().max().item()
                assert error <= rtol * scale, (
                    f"{name}: off by {error:.2e} where gradients reach {scale:.2e}"
                )


def _mean_penalty(kl_estimator, logps, ref, log_guide, mask, k3_max):
    """What a micro-batch logs as its `kl`: Unsloth the mean over completions that have tokens of
    their tokens' mean penalty, TRL that over tokens.
    """
    logps, anchor = logps.detach(), ref if log_guide is None else ref + log_guide
    penalty = PENALTIES.get(kl_estimator, k3)(logps, anchor) * mask
    if kl_estimator not in PENALTIES and k3_max is not None:
        penalty = penalty.clamp(max=k3_max)
    if without_unsloth():
        return (penalty.sum() / mask.sum()).item()
    lengths = mask.sum(-1)
    return (penalty.sum(-1)[lengths > 0] / lengths[lengths > 0]).mean().item()


def _compare_signals(signals, inputs, of_oracle):
    """What the guide was shown is what the oracle computes."""
    for name, found in vars(signals).items():
        if found is not None and name != "mask":
            found = in_completion_layout(found, inputs)
            expected = getattr(of_oracle, name)
            torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


def _tokens_per_optimizer_step(inputs, args):
    """What those losses divide by: the generation batch's tokens, scaled to one accumulation window
    as TRL does.
    """
    count = inputs["num_items_in_batch"]
    if args.loss_type not in whole_batch_losses():
        return None
    return float(count) * args.gradient_accumulation_steps / args.steps_per_generation


def train_and_check(trainer, guide=None, rtol=1e-5, kl_estimator=None, max_resamples=0, **options):
    """Run trainer.train() under guide and estimator, compare each step with the oracle, and return
    the oracle.

    Without an estimator it is the one of Unsloth's own that the trainer's arguments name. `options`
    go to `guided_kl`; a teacher is given as the pair of what it takes and a float64 model for the
    oracle.
    """
    from sage_unsloth.methods.composed import with_methods

    estimator = kl_estimator or ("k3-is" if trainer.args.use_bias_correction_kl else "k3")
    recording = None
    if guide is not None:
        recording = (SteeredRecording if isinstance(guide, SteeredGuide) else Recording)(guide)
    teacher, of_oracle = options.pop("teacher", (None, None))
    oracle = Oracle(
        trainer,
        recording,
        estimator,
        options.get("credit", "token"),
        of_oracle,
        options.get("shape"),
        options.get("advantages", "grpo"),
        options.get("kl_in", "loss"),
        options.get("k3_bounded"),
    )
    options |= dict(kl_estimator=estimator, teacher=teacher, max_resamples=max_resamples)
    with with_methods(trainer, recording, **options):
        trainer.train()
    oracle.check(rtol)
    return oracle
