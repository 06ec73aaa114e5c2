"""`guided_kl`: the KL anchor q·π_ref inside the GRPO loss of Unsloth's or TRL's trainer.

Both compute the KL penalty of a token as exp(d) − d − 1 with d = ref_logps − new_logps (Unsloth
clamps it), and use the reference log-probabilities nowhere else. So adding log_guide to `ref_logps`
makes q·π_ref the anchor: no second loss and no further forward pass. Its gradient in expectation is
in `objective/kl.py`.

The worst failure is a wrong loss without an exception. So a contract (`contract.py`) checks names,
parameters, calls and numbers before anything is replaced, and a step that bypasses the hook stops
training (`watch.py`); both raise `ContractError`.

Read next: `unsloth_seam.py` (or `trl_seam.py`), then `hook.py`. docs/architecture.md lists the five
files of this path.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sage_unsloth.objective.advantages import ShapeAdvantages
from sage_unsloth.objective.describe import describe
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.patch.choice import OPEN_ATTRIBUTE, Choice, added_methods
from sage_unsloth.patch.rollout_batch import rollout_signals
from sage_unsloth.patch.seam import seam_of
from sage_unsloth.patch.settings import check_choice
from sage_unsloth.patch.trained_with import resume_record
from sage_unsloth.patch.watch import guide_watch
from sage_unsloth.trainers.data_order import keep_row_order
from sage_unsloth.trainers.finite import finite_only
from sage_unsloth.trainers.replaced import one_guided_kl, replace_attributes, with_callback
from sage_unsloth.trainers.rollout_weights import keep_trained_weights

logger = logging.getLogger(__name__)


@contextmanager
def guided_kl(
    trainer: Any,
    guide: Guide | None = None,
    *,
    teacher: Any = None,
    shape: ShapeAdvantages | None = None,
    log_entropy: bool = False,
    resume_with_changes: bool = False,
) -> Iterator[None]:
    """Within this context, the KL anchor of `trainer` is q·π_ref instead of π_ref.

        with guided_kl(trainer, BranchGuide()):
            trainer.train()

    Other methods (`sage_unsloth.methods`) are contexts; open them before it:

        with advantages_by(trainer, "maxrl"), guided_kl(trainer, BranchGuide()):
            trainer.train()

    With torchrun or accelerate every process calls it; step and metrics are then those of the whole
    batch.

    Each optimizer step also logs the metrics of `sage_unsloth.objective.guide_metrics`, if anything
    in the loss is replaced. A guide's schedule follows `trainer.state.global_step`. Its noise comes
    from a generator seeded by `trainer.args.seed`, the step, the micro-batch and the process, so a
    resumed run gets the same values.

    Args:
        trainer: Unsloth's generated `GRPOTrainer`; or TRL's own, if Unsloth is not imported
            (docs/many_gpus.md). Other trainers in the process are not affected.
        guide: any object with the members of `Guide`; None means q = 1.
        teacher: for a guide that needs "teacher_logps": a frozen model with the same tokenizer, or
            the name of a frozen adapter in the trainer's model. It scores each rollout batch once,
            without gradient.
        shape: your own function (signals, advantages) → advantages, (B,) or (B, T), in units of
            reward and without gradient; values outside the mask are dropped. `signals.entropies`
            needs `log_entropy`. Arguments named in `objective.advantages.OFFERED` are passed too.
        log_entropy: log `sage/entropy` (and `kl/ref_k3`) even if no guide needs entropies, also
            without a KL term. The loss does not change; Unsloth computes the entropies in the
            gradient pass, as TRL always does.
        resume_with_changes: allow a checkpoint with a different guide, β, teacher, shape, method
            or trainer, which is otherwise refused. A guide whose state is not in the checkpoint
            starts from its initial state.

    Raises:
        ValueError: a guide with `trainer.beta` = 0, an unexpected `use_bias_correction_kl`,
            methods that contradict each other, a missing teacher, a model that is not prepared for
            Unsloth's trainer, a tokenizer without a pad token, a missing column, a setting that
            changed while this was open, or a guide that returned an invalid tensor or wrote into
            its input.
        TypeError: `guide` is not a guide.
        ContractError: the trainer differs from the tested versions, another `guided_kl` is open, or
            a training step bypassed this one.
        NotFiniteError: a number of a training step is nan or inf; see
            `sage_unsloth.trainers.finite`.
        ChangedWeightsError: a rollout changed a trained weight; see
            `sage_unsloth.trainers.rollout_weights`.
    """
    seam = seam_of(trainer)
    choice = Choice(
        guide=guide,
        teacher=teacher,
        shape=shape,
        log_entropy=log_entropy,
        methods=added_methods(trainer),
    )
    # All refusals come before the first change, so that nothing has to be undone.
    check_choice(trainer, choice, unsloth=seam.name == "unsloth")
    if choice.needs_hook:
        seam.check()
    with ExitStack() as stack:
        # Unsloth's functions are replaced for the whole process, so one guided_kl at a time.
        stack.enter_context(one_guided_kl())
        stack.enter_context(replace_attributes(trainer, **{OPEN_ATTRIBUTE: True}))
        stack.enter_context(seam.cpu_shims(trainer))
        guard = stack.enter_context(finite_only(trainer))
        # After the guard, to which the hook hands its signals.
        hook = None  # None: the trainer's own loss runs
        if choice.needs_hook:
            of_batch = stack.enter_context(
                rollout_signals(trainer, choice.needs, scoring=seam.scoring, teacher=teacher)
            )
            hook = stack.enter_context(seam.install_hook(trainer, choice, guard, of_batch))
        adapters = seam.own_adapters(trainer)
        watch = guide_watch(
            trainer,
            None if hook is None else hook.measured,
            None if hook is None else hook.clock,
            guide=guide,
            record=resume_record(trainer, choice, seam=seam.name, own_adapters=adapters),
            frozen_adapters=(*adapters, *([teacher] if isinstance(teacher, str) else [])),
            loss=seam.loss,
            resume_with_changes=resume_with_changes,
        )
        stack.enter_context(with_callback(trainer, watch))
        stack.enter_context(keep_row_order(trainer))
        stack.enter_context(keep_trained_weights(trainer))
        yield
        if hook is not None and hook.measured.micro_batches == 0:
            logger.warning(
                "guided_kl closed before its trainer took a step, so nothing was trained with %s. "
                "Call trainer.train() inside the context",
                describe(guide),
            )
