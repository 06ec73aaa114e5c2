"""`guided_kl`: the KL anchor q·π_ref inside Unsloth's fast GRPO loss.

Unsloth's generated trainer computes the KL penalty of a token as exp(d) − d − 1 with
d = ref_logps − new_logps, and uses the reference log-probabilities nowhere else. So adding
log_guide to `ref_logps` *is* the guide-weighted pseudo-KL: no second loss and no further forward
pass. While `guided_kl` is open, three places of Unsloth's loss are rewritten (`rewrite.py`):

    whether entropies are computed     also if the guide asks for them
    what computes them                 `scoring.py`, where that is cheaper
    UnslothEfficientGRPO.apply(…)      becomes _Hook.apply(trainer, entropies, …)

The hook sees every (B, T) tensor of the loss. Under "k3" and "k3-is" it shifts `ref_logps` and
calls what Unsloth would have called. Another penalty goes through a copy of that function over
another kernel (`kernel.py`). Chunks, compilation and every scale (gradient accumulation, fp16) stay
Unsloth's.

The worst failure is no exception and the wrong loss. So `contract.py` checks names, parameters,
matches and numbers before anything is replaced, and the first optimizer step that does not pass
through the hook stops training (`watch.py`); both raise `ContractError`.

Read next: `rewrite.py`. What is called here and not needed to follow it: `settings.py` (arguments
that contradict the trainer), `rollout_batch.py` (what is scored once for each rollout batch),
`finite.py` (nan and inf), `rollout_weights.py` (an engine that writes into the policy),
`scoring.py` (entropies from one pass over the logits).
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.advantage_rules import GRPO, AdvantageRule, Rule, advantage_rule
from sage_unsloth.objective.advantages import ShapeAdvantages, shaped, with_sequence_credit
from sage_unsloth.objective.kl import PENALTIES
from sage_unsloth.objective.protocols import Guide, describe
from sage_unsloth.objective.signals import OPTIONAL_SIGNALS, TokenSignals, read_only
from sage_unsloth.patch import unsloth_names as names
from sage_unsloth.patch.clock import Clock
from sage_unsloth.patch.contract import check_contract
from sage_unsloth.patch.data_parallel import pooled_means
from sage_unsloth.patch.finite import Guard, finite_only
from sage_unsloth.patch.group_rewards import rule_advantages
from sage_unsloth.patch.kernel import kernel_with
from sage_unsloth.patch.loading import trainer_module
from sage_unsloth.patch.replaced import alone, replaced, watched
from sage_unsloth.patch.rollout_batch import rollout_signals
from sage_unsloth.patch.rollout_weights import keep_trained_weights
from sage_unsloth.patch.scoring import scorer
from sage_unsloth.patch.settings import check_settings
from sage_unsloth.patch.trained_with import trained_with
from sage_unsloth.patch.unsloth_names import ContractError
from sage_unsloth.patch.watch import Measured, guide_watch

logger = logging.getLogger(__name__)


@contextmanager
def guided_kl(
    trainer: Any,
    guide: Guide | None = None,
    *,
    kl_estimator: str = "k3",
    credit: str = "token",
    teacher: Any = None,
    advantages: Rule = GRPO,
    shape_advantages: ShapeAdvantages | None = None,
    log_entropy: bool = False,
    resume_with_changes: bool = False,
) -> Iterator[None]:
    """Within this context, the KL anchor of `trainer` is q·π_ref instead of π_ref.

        with guided_kl(trainer, BranchGuide()):
            trainer.train()

    With torchrun or accelerate it is called in every process; step and metrics are then those of
    the whole batch.

    Unless nothing is replaced, each optimizer step logs the metrics of
    `sage_unsloth.objective.guide_metrics` beside Unsloth's own, of which `kl` is the mean of the
    chosen penalty. The guide's time is `trainer.state.global_step`; its noise is drawn from a
    generator seeded by `trainer.args.seed`, the step, the micro-batch and the process, so a resumed
    run gets the same values.

    Args:
        trainer: Unsloth's generated `GRPOTrainer`. Other trainers in the process are not affected.
        guide: any object with the members of `Guide`; None is q = 1.
        kl_estimator: one of `sage_unsloth.objective.kl.KL_ESTIMATORS`. "k3" and "k3-is" are
            Unsloth's own: with these alone, nothing is replaced.
        credit: "token" is the paper's loss, a sum of per-token penalties. "sequence" follows Eq. 6:
            each token's advantage includes the guide and the KL of the tokens after it
            (`credit.sequence_credit`). It needs a penalty with the reverse KL's gradient,
            token-level importance ratios, and all completions of a prompt in one micro-batch.
        teacher: for a guide that needs "teacher_logps": a frozen model with the same tokenizer, or
            the name of a frozen adapter in the trainer's model. It scores each rollout batch once,
            without gradient.
        advantages: the rule that makes advantages of a group's rewards, in the place of TRL's
            centring and division: a name of `objective.advantage_rules.RULES` with its settings
            ("pkpo,k=4"), "module:function", or a function of yours, (P, G) → (P, G)
            (`group_rewards`). "grpo" is TRL's.
        shape_advantages: your own (signals, advantages) → advantages, (B,) or (B, T), in units of
            reward and used without gradient; values outside the mask are dropped.
            `signals.entropies` are there with `log_entropy`. Applied before `credit` adds its part,
            which multiplies what it returns by n/(n − 1), as all of TRL's advantages
            (`credit.leave_one_out`).
        log_entropy: log `sage/entropy` (and `kl/ref_k3`) also where no guide needs entropies,
            without a KL term too. The loss stays what it is; Unsloth computes the entropies in the
            gradient pass.
        resume_with_changes: resume a checkpoint that was trained with another guide, penalty,
            credit, β, teacher, rule or `shape_advantages` (each checkpoint records them);
            otherwise it is refused. A guide whose state the checkpoint lacks begins at its first.

    Raises:
        ValueError: `trainer.beta` is 0 with a guide or with an estimator that is not Unsloth's own,
            an unknown estimator or credit, one that `trainer.args` contradict or whose loss type is
            not supported, a guide without the teacher that it needs, the model is not prepared for
            Unsloth, the tokenizer has no pad token, the dataset lacks a column, a setting changed
            while this was open, or the guide returned a wrong tensor or wrote into its input.
        TypeError: `guide` is not a guide.
        ContractError: Unsloth is not what was tested, another `guided_kl` is open, or training took
            a step that bypassed it.
        NotFiniteError: a number of a training step is nan or inf; see `sage_unsloth.patch.finite`.
        ChangedWeightsError: a rollout changed a trained weight; see
            `sage_unsloth.patch.rollout_weights`.
    """
    module = trainer_module(type(trainer))
    rule = advantage_rule(advantages)
    check_settings(
        trainer,
        guide=guide,
        kl_estimator=kl_estimator,
        credit=credit,
        teacher=teacher,
        rule=rule,
    )
    own_penalty = kl_estimator in PENALTIES
    ours = guide is not None or shape_advantages is not None or credit != "token"
    watch = partial(
        guide_watch,
        trainer,
        guide=guide,
        record=trained_with(
            trainer,
            guide=guide,
            kl_estimator=kl_estimator,
            credit=credit,
            teacher=teacher,
            rule=rule,
            shape_advantages=shape_advantages,
        ),
        teacher=teacher,
        resume_with_changes=resume_with_changes,
    )
    if not (ours or own_penalty or log_entropy):
        # Unsloth's own loss is the one asked for, so nothing of it is replaced.
        with (
            alone(),
            watched(trainer, watch(None, None)),
            finite_only(trainer),
            keep_trained_weights(trainer),
            rule_advantages(trainer, rule),
        ):
            yield
        return
    rewritten = check_contract(module)
    plain = getattr(module, names.FUNCTION)
    hook = _Hook(
        trainer=trainer,
        guide=guide,
        credit=credit,
        rule=rule,
        shape_advantages=shape_advantages,
        log_entropy=log_entropy,
        plain=plain,
        function=rewritten.function if own_penalty else plain,
    )
    # The names that the rewritten source calls, and that source in the place of Unsloth's. The
    # module is the trainer's, so these names are looked up there at every call.
    called = {
        names.NEEDS_ENTROPIES_HOOK: hook.needs_entropies,
        names.CALL_HOOK: hook.apply,
        names.SCORER_HOOK: scorer,
        names.LOSS: rewritten.loss,
    }
    if own_penalty:
        kernel = getattr(module, names.KERNEL)
        called[names.KERNEL_HOOK] = kernel_with(PENALTIES[kl_estimator], kernel)
    needs = set() if guide is None else set(guide.needs)
    with ExitStack() as stack:
        stack.enter_context(alone())
        stack.enter_context(replaced(module, **called))
        stack.enter_context(watched(trainer, watch(hook.measured, hook.clock)))
        hook.guard = stack.enter_context(finite_only(trainer))
        stack.enter_context(keep_trained_weights(trainer))
        hook.of_batch = stack.enter_context(
            rollout_signals(trainer, needs, groups=credit == "sequence", teacher=teacher)
        )
        stack.enter_context(rule_advantages(trainer, rule))
        yield
        if hook.measured.micro_batches == 0:
            logger.warning(
                "guided_kl closed, and its trainer has not taken a step inside: nothing was "
                "trained with %s; call trainer.train() inside the context",
                describe(guide),
            )


@dataclass(kw_only=True)
class _Hook:
    """What the rewritten loss calls (its scorer aside) while one `guided_kl` is open."""

    trainer: Any
    guide: Guide | None
    credit: str
    rule: AdvantageRule
    shape_advantages: ShapeAdvantages | None
    log_entropy: bool
    plain: Any  # UnslothEfficientGRPO
    function: Any  # the same, or its copy over the kernel with another penalty
    # Set by `guided_kl` as it opens them, before the first call of `apply`.
    guard: Guard = field(init=False)
    of_batch: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.trainer)
        self.measured = Measured(self.trainer, self.guide)

    def needs_entropies(self, trainer: Any) -> bool:
        asked = self.guide is not None and "entropies" in self.guide.needs
        return trainer is self.trainer and (asked or self.log_entropy)

    def apply(self, trainer: Any, entropies: Tensor | None, *arguments: Any) -> tuple:
        """In the place of `UnslothEfficientGRPO.apply(*arguments)`, and what that returns.

        Tensors are (B, T) of one micro-batch, log-probs and entropies in nats; advantages are (B,)
        or (B, T). For another trainer in the process this is that call as it came.
        """
        if trainer is not self.trainer:
            return self.plain.apply(*arguments)
        # In the order that `rewrite.py` has checked.
        new_logps, old_logps, ref_logps, sampling_logps, head, ids, mask, *rest = arguments
        advantages, beta, *rest = rest
        if trainer.beta != 0.0 and ref_logps is None:
            raise ContractError(
                "beta is not 0, so reference log-probs must exist", found=None, expected="(B, T)"
            )
        # Unsloth calls this under autocast, which would run matrix products in 16 bits.
        with torch.no_grad(), torch.autocast(mask.device.type, enabled=False):
            signals = self._signals(new_logps, ref_logps if beta else None, entropies, mask)
            log_guide = self._log_guide(signals)
            advantages, credit = self._advantages(advantages, signals, log_guide)
            # A nan is named here, before it disappears into the loss.
            checked = {"old_logps": old_logps, "advantages": advantages, "log_guide": log_guide}
            self.guard.check_signals(vars(signals) | {"mask": None} | checked, mask)
            self.measured.add(signals, log_guide, credit)
            if log_guide is not None:
                ref_logps = ref_logps + log_guide  # the whole method: π_ref becomes q·π_ref
        function = self.function if beta else self.plain
        logps = (new_logps, old_logps, ref_logps, sampling_logps)
        result = function.apply(*logps, head, ids, mask, advantages, beta, *rest)
        return pooled_means(result, mask, trainer.accelerator)

    def _signals(
        self, new_logps: Tensor, ref_logps: Tensor | None, entropies: Tensor | None, mask: Tensor
    ) -> TokenSignals:
        """What the guide sees of this micro-batch; without gradient, so q is a constant in the
        update.
        """
        return TokenSignals(
            new_logps.detach(),
            None if ref_logps is None else ref_logps.detach(),
            mask,
            None if entropies is None else entropies.detach(),
            **{name: v for name, v in self.of_batch.items() if name in OPTIONAL_SIGNALS},
        )

    def _log_guide(self, signals: TokenSignals) -> Tensor | None:
        """log q_t, (B, T), 0 outside the mask; None without a guide or without a KL term."""
        if self.guide is None or signals.ref_logps is None:
            return None
        step, max_steps, generator = self.clock.tick()
        with read_only(vars(signals), self.guide):
            log_guide = self.guide.log_guide(
                signals, step=step, max_steps=max_steps, generator=generator
            )
        mask, found = signals.mask, f"{log_guide!r:.100}"
        if isinstance(log_guide, Tensor):
            if log_guide.shape == mask.shape and log_guide.dtype == torch.float32:
                return torch.where(mask.bool(), log_guide.detach(), 0.0)
            found = f"{log_guide.dtype} {tuple(log_guide.shape)}"
        raise ValueError(
            f"log_guide must return a float32 tensor of the mask's shape; got {found} for "
            f"{tuple(mask.shape)} from {self.guide!r}"
        )

    def _advantages(
        self, advantages: Tensor, signals: TokenSignals, log_guide: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The advantages of the loss, and the part of them that is sequence credit, (B, T)."""
        if self.shape_advantages is not None:
            advantages = shaped(self.shape_advantages, signals, advantages)
        if self.credit == "token":
            return advantages, None
        groups, beta = self.of_batch["groups"], self.trainer.beta
        return with_sequence_credit(
            advantages,
            signals,
            groups,
            beta=beta,
            log_guide=log_guide,
            own_baseline=not self.rule.is_grpo,
        )
