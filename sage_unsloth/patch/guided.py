"""The one seam to Unsloth: what knows about its internals is in this file, in `contract.py` and in
`rollout_batch.py`.

Unsloth's generated GRPO trainer computes `KL_i = exp(d) − d − 1` with `d = ref_logps − new_logps`,
and uses the reference log-probabilities nowhere else. So `ref_logps + log_guide` *is* the
guide-weighted pseudo-KL: no second loss and no further forward pass. Two expressions of its
`grpo_accumulated_loss` are rewritten while `guided_kl` is open:

    _need_entropy = <condition>            ->  _need_entropy = <condition> or the guide asks for entropies
    UnslothEfficientGRPO.apply(new, …)     ->  <our hook>(trainer, entropies, new, …)

Entropies then come out of the gradient pass that Unsloth makes anyway, chunk by chunk, never as (B,
T, V): on 2026.10.9 out of its own kernel, on 2026.10.7, whose own computes the logits twice for
them, out of `scoring.py` if the head is frozen. The hook has every argument of the call, each (B,
T) tensor of the loss among them. For k3 it shifts `ref_logps` and calls Unsloth's function. For
another penalty it calls a copy of that function over another loss kernel, which adds to Unsloth's
own loss at β = 0 the penalty, reduced by Unsloth's own loss too: at ratio 1 and β = 0 the advantage
A costs −A, so advantages of −penalty give exactly the penalty, normalised as the loss type has it.
Chunks, compilation and every scale (gradient accumulation, fp16, DeepSpeed) stay Unsloth's.

The worst failure is no exception and the wrong loss. Therefore `contract.py` checks what is relied
on before anything is replaced, and the first optimizer step must have passed through the hook;
anything else is a `ContractError`.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.credit import leave_one_out, sequence_credit
from sage_unsloth.objective.guide_metrics import GuideMetrics
from sage_unsloth.objective.guides import Guide, SteeredGuide
from sage_unsloth.objective.kl import PENALTIES
from sage_unsloth.objective.signals import OPTIONAL_SIGNALS, TokenSignals
from sage_unsloth.patch.contract import check_contract
from sage_unsloth.patch.data_parallel import check_data_parallel
from sage_unsloth.patch.finite import Guard, finite_only
from sage_unsloth.patch.kernel import kernel_with
from sage_unsloth.patch.loading import trainer_module
from sage_unsloth.patch.rollout_batch import rollout_signals
from sage_unsloth.patch.scoring import scorer
from sage_unsloth.patch.settings import (
    check_causal,
    check_columns,
    check_estimator,
    check_guide,
    check_teacher,
    check_trainer_credit,
)
from sage_unsloth.patch.unsloth_names import (
    CALL_HOOK,
    FUNCTION,
    KERNEL,
    KERNEL_HOOK,
    LOSS,
    NEEDS_ENTROPIES_HOOK,
    SCORER_HOOK,
    ContractError,
)
from sage_unsloth.patch.watch import guide_watch

ShapeAdvantages = Callable[[TokenSignals, Tensor], Tensor]


logger = logging.getLogger(__name__)


@contextmanager
def guided_kl(
    trainer: Any,
    guide: Guide | None = None,
    *,
    kl_estimator: str = "k3",
    credit: str = "token",
    teacher: Any = None,
    shape_advantages: ShapeAdvantages | None = None,
    log_entropy: bool = False,
) -> Iterator[None]:
    """Within this context, the KL anchor of `trainer` is q·π_ref instead of π_ref, and its penalty
    is `kl_estimator`.

        with guided_kl(trainer, BranchGuide()):
            trainer.train()

    With torchrun or accelerate it is called in every process; step and metrics are then those of
    the whole batch.

    Each optimizer step logs the metrics of `sage_unsloth.objective.guide_metrics` beside Unsloth's
    own, of which `kl` is the mean of the chosen penalty. The guide's time is
    `trainer.state.global_step`; its noise is drawn from a generator seeded by `trainer.args.seed`,
    the step, the micro-batch and the process, so a resumed run goes on with the same values.

    Args:
        trainer: Unsloth's generated `GRPOTrainer`. Other trainers in the process are not affected.
        guide: any object with the members of `Guide`; None is q = 1.
        kl_estimator: one of `sage_unsloth.objective.kl.KL_ESTIMATORS`. "k3" and "k3-is" are
            Unsloth's own: without a guide nothing of the loss is replaced then, unless something
            else of these asks for it.
        credit: "token" is the paper's loss, a sum of per-token penalties. "sequence" follows Eq. 6:
            each token's advantage gets what the later tokens' guide and KL owe to it
            (`credit.sequence_credit`). It needs a penalty with the reverse KL's gradient,
            token-level importance ratios, and all completions of a prompt in one micro-batch.
        teacher: for a guide that needs "teacher_logps": a frozen model with the same tokenizer, or
            the name of a frozen adapter in the trainer's model. It scores each rollout batch once,
            without gradient.
        shape_advantages: your own (signals, advantages) → advantages, (B,) or (B, T), in units of
            reward and used without gradient; values outside the mask are dropped.
            `signals.entropies` are there with `log_entropy`. Applied before `credit` adds its part,
            which multiplies what it returns by n/(n − 1), as all advantages
            (`credit.leave_one_out`).
        log_entropy: log `sage/entropy` (and `kl/ref_k3`) also where no guide needs entropies,
            without a KL term too. The loss stays what it is; Unsloth computes the entropies in the
            gradient pass.

    Raises:
        ValueError: `trainer.beta` is 0 with a guide or with an estimator that is not Unsloth's own,
            an unknown estimator or credit, one that `trainer.args` contradict or whose loss type is
            not supported, a guide without the teacher that it needs, the model is not prepared for
            Unsloth, the tokenizer has no pad token, or the dataset lacks a column.
        TypeError: `guide` is not a guide.
        ContractError: Unsloth is not what was tested, another `guided_kl` is open, or training took
            a step that bypassed it.
        NotFiniteError: a number of a training step is nan or inf; see `sage_unsloth.patch.finite`.
    """
    if guide is not None:
        check_guide(guide, trainer.beta)
    if getattr(trainer.processing_class, "pad_token_id", None) is None:
        raise ValueError(
            "the tokenizer must have a pad token because Unsloth finds completions by it; "
            "got pad_token_id=None; set tokenizer.pad_token before building the trainer"
        )
    module = trainer_module(type(trainer))
    check_data_parallel(trainer.accelerator)
    check_estimator(trainer, kl_estimator)
    check_trainer_credit(trainer, credit, kl_estimator)
    check_causal(credit, guide)
    needs = set() if guide is None else set(guide.needs)
    check_teacher(needs, teacher)
    if not hasattr(trainer.model, "for_training"):
        raise ValueError(
            "the model must have for_training and for_inference because Unsloth's trainer calls "
            "them; "
            f"{type(trainer.model).__name__} has not; load it by "
            f"FastLanguageModel.from_pretrained, or without a GPU by "
            "sage_unsloth.models.loading.load_policy, which calls prepare_for_cpu(model)"
        )
    check_columns(trainer)
    namespace = vars(module)
    if CALL_HOOK in namespace:
        raise ContractError(
            "guided_kl must not be nested, because two guides would multiply",
            found="another guided_kl that is open",
            expected="one at a time",
        )
    nothing_of_ours = (guide, shape_advantages) == (None, None) and credit == "token"
    if nothing_of_ours and kl_estimator not in PENALTIES and not log_entropy:
        with finite_only(trainer):
            yield
        return
    rewritten = check_contract(module)
    plain = namespace[FUNCTION]
    function = rewritten.function if kl_estimator in PENALTIES else plain
    hook = _Hook(trainer, guide, plain, function, log_entropy, credit, shape_advantages)
    watch = guide_watch(hook, teacher)
    original = namespace[LOSS]
    namespace[NEEDS_ENTROPIES_HOOK] = hook.needs_entropies
    namespace[CALL_HOOK] = hook.apply
    namespace[SCORER_HOOK] = scorer
    if kl_estimator in PENALTIES:
        namespace[KERNEL_HOOK] = kernel_with(PENALTIES[kl_estimator], namespace[KERNEL])
    namespace[LOSS] = rewritten.loss
    trainer.add_callback(watch)
    try:
        with (
            finite_only(trainer) as hook.guard,
            rollout_signals(
                trainer, needs, groups=credit == "sequence", teacher=teacher
            ) as hook.of_batch,
        ):
            yield
    finally:
        trainer.remove_callback(watch)
        namespace[LOSS] = original
        for name in (NEEDS_ENTROPIES_HOOK, CALL_HOOK, SCORER_HOOK, KERNEL_HOOK):
            namespace.pop(name, None)


class _Hook:
    """The state of one open `guided_kl`: what the two rewritten expressions call."""

    def __init__(
        self,
        trainer: Any,
        guide: Guide | None,
        plain: type,
        function: type,
        log_entropy: bool,
        credit: str,
        shape_advantages: ShapeAdvantages | None,
    ) -> None:
        self.trainer = trainer
        self.credit = credit
        self.shape_advantages = shape_advantages
        self.guard: Guard | None = None
        self.of_batch: dict[str, Tensor] = {}
        self.log_entropy = log_entropy
        self.guide = guide
        self.plain = plain
        self.function = function
        self.consulted = 0
        self._moment: tuple[int, bool] | None = None
        self._micro_batch = 0
        self.metrics = {"train": GuideMetrics(), "eval": GuideMetrics()}
        # What a guide is steered by: of one optimizer step, however seldom the trainer logs.
        self.of_step = GuideMetrics()
        self.metrics_of_step: dict[str, list] = {}

    def needs_entropies(self, trainer: Any) -> bool:
        asked = self.guide is not None and "entropies" in self.guide.needs
        return trainer is self.trainer and (asked or self.log_entropy)

    def apply(
        self,
        trainer: Any,
        entropies: Tensor | None,
        new_logps: Tensor,
        old_logps: Tensor | None,
        ref_logps: Tensor | None,
        sampling_logps: Tensor | None,
        lm_head: Tensor,
        input_ids: Tensor,
        mask: Tensor,
        advantages: Tensor,
        beta: float,
        *rest: Any,
    ) -> tuple:
        """In the place of `UnslothEfficientGRPO.apply`; tensors are (B, T), the advantages (B,) or
        (B, T).

        For another trainer this is that call as it came; without a KL term too, once it is
        measured.
        """
        function = self.plain
        if trainer is self.trainer:
            if self.trainer.beta != 0.0 and ref_logps is None:
                raise ContractError(
                    "beta is not 0, so reference log-probs must exist",
                    found=None,
                    expected="(B, T)",
                )
            # Unsloth calls this under autocast, where sums that are written as products would have
            # 16 bits.
            with torch.no_grad(), torch.autocast(mask.device.type, enabled=False):
                signals = self._signals(
                    ref_logps if beta != 0.0 else None, new_logps, entropies, mask
                )
                guided = self.guide is not None and signals.ref_logps is not None
                log_guide = self._log_guide(signals) if guided else None
                advantages, credit = self._advantages(advantages, signals, log_guide)
                self.guard.check_signals(
                    vars(signals)
                    | {
                        "mask": None,
                        "old_logps": old_logps,
                        "advantages": advantages,
                        "log_guide": log_guide,
                    },
                    mask,
                )
                self._measure(signals, log_guide, credit)
                self.consulted += 1
                if beta != 0.0:
                    function = self.function
                if log_guide is not None:
                    ref_logps = ref_logps + log_guide
        result = function.apply(
            new_logps,
            old_logps,
            ref_logps,
            sampling_logps,
            lm_head,
            input_ids,
            mask,
            advantages,
            beta,
            *rest,
        )
        return self._of_all_processes(result, mask) if trainer is self.trainer else result

    def _of_all_processes(self, result: tuple, mask: Tensor) -> tuple:
        """Unsloth's result with the two means that it logs, completion length and KL, taken over
        the rows of every process.
        """
        if self.trainer.accelerator.num_processes == 1:
            return result
        loss, length, kl, *rest = result
        rows = torch.tensor(float(len(mask)), device=mask.device)
        kept = (mask.sum(-1) > 0).sum().float()
        sums = self.trainer.accelerator.reduce(
            torch.stack([length.detach() * rows, rows, kl.detach() * kept, kept]), "sum"
        )
        return (loss, sums[0] / sums[1], sums[2] / sums[3].clamp(min=1), *rest)

    def _signals(
        self, ref_logps: Tensor | None, new_logps: Tensor, entropies: Tensor | None, mask: Tensor
    ) -> TokenSignals:
        """What the guide sees of this micro-batch."""
        of_batch = {k: v for k, v in self.of_batch.items() if k in OPTIONAL_SIGNALS}
        return TokenSignals(
            new_logps.detach(),
            None if ref_logps is None else ref_logps.detach(),
            mask,
            None if entropies is None else entropies.detach(),
            **of_batch,
        )

    def _advantages(
        self, advantages: Tensor, signals: TokenSignals, log_guide: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The advantages of the loss, (B,) or (B, T), and the part of them that is sequence credit,
        (B, T).
        """
        if self.shape_advantages is not None:
            shaped = self.shape_advantages(signals, advantages).detach()
            if shaped.shape not in (advantages.shape, signals.mask.shape):
                raise ValueError(
                    f"shape_advantages must return (B,) or (B, T); got {tuple(shaped.shape)} for "
                    f"{tuple(signals.mask.shape)}"
                )
            if shaped.dim() == 2:  # outside the mask the signals mean nothing, and 0 · nan is nan
                shaped = torch.where(signals.mask.bool(), shaped, 0.0)
            advantages = shaped
        if self.credit == "token":
            return advantages, None
        groups = self.of_batch["groups"]
        credit = sequence_credit(
            signals.policy_logps,
            signals.ref_logps,
            signals.mask,
            groups,
            beta=self.trainer.beta,
            log_guide=log_guide,
        )
        advantages = leave_one_out(advantages, groups)
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        return advantages + credit.to(advantages.dtype), credit

    def _measure(
        self, signals: TokenSignals, log_guide: Tensor | None, credit: Tensor | None
    ) -> None:
        mode = "train" if self.trainer.model.training else "eval"
        metrics, gather = self.trainer._metrics[mode], self.trainer.accelerator.gather
        self.metrics[mode].add(signals, log_guide, gather, metrics, credit)
        if isinstance(self.guide, SteeredGuide):
            if mode == "train":
                self.of_step.add(signals, log_guide, gather, self.metrics_of_step)
            metrics.update({f"sage/{name}": [value] for name, value in self.guide.state().items()})

    def _log_guide(self, signals: TokenSignals) -> Tensor:
        """What the guide returns, (B, T), 0 outside the mask."""
        step, max_steps, generator = self._time()
        log_guide = self.guide.log_guide(
            signals, step=step, max_steps=max_steps, generator=generator
        ).detach()
        mask = signals.mask
        if log_guide.shape != mask.shape or log_guide.dtype != torch.float32:
            raise ValueError(
                "log_guide must return a float32 tensor of the mask's shape; got "
                f"{log_guide.dtype} {tuple(log_guide.shape)} for {tuple(mask.shape)} from "
                f"{self.guide!r}"
            )
        return torch.where(mask.bool(), log_guide, 0.0)

    def _time(self) -> tuple[int, int, torch.Generator]:
        """Optimizer step, number of steps, and a generator that depends on nothing but seed, step
        and micro-batch.
        """
        state, args = self.trainer.state, self.trainer.args
        step, training = state.global_step, self.trainer.model.training
        self._micro_batch = self._micro_batch + 1 if self._moment == (step, training) else 0
        self._moment = (step, training)
        key = (args.seed, step, training, self._micro_batch, self.trainer.accelerator.process_index)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return step, max(state.max_steps, args.max_steps, 1), generator
