"""The one seam to Unsloth: everything that knows about its internals is in this file.

Unsloth's generated GRPO trainer computes `KL_i = exp(d) − d − 1` with `d = ref_logps − new_logps`, and uses the reference
log-probabilities nowhere else. So `ref_logps + log_guide` *is* the guide-weighted pseudo-KL: no second loss and no further
forward pass. Two expressions of its `grpo_accumulated_loss` are rewritten while `guided_kl` is open:

    _need_entropy = <condition>                 ->  _need_entropy = <condition> or the guide asks for entropies
    UnslothEfficientGRPO.apply(new, old, ref_logps, …)  ->  UnslothEfficientGRPO.apply(new, old, <anchor>, …)

Entropies then come out of the gradient pass that Unsloth makes anyway, chunk by chunk, never as (B, T, V).

The worst failure is no exception and the wrong loss. Therefore the names, the parameters, the number of matches and, on
small tensors, the numbers themselves are checked before anything is replaced, and the first optimizer step must have
consulted the guide; anything else is a `ContractError`.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.guides import Guide, TokenSignals
from sage_unsloth.losses import grpo_loss
from sage_unsloth.monitor import GuideMetrics
from sage_unsloth.records import package_version
from sage_unsloth.rewards import SolutionReward

TESTED_VERSIONS = ("2026.10.7", "2026.10.9")
"""Versions of unsloth (with the unsloth_zoo of the same number) that the tests have passed on."""

LOSS = "grpo_accumulated_loss"
FUNCTION = "UnslothEfficientGRPO"
KERNEL = "grpo_compute_loss"
EXPECTED_PARAMETERS = {
    LOSS: ("trainer", "input_ids", "attention_mask", "logits_to_keep", "completion_mask", "advantages", "old_logps",
           "ref_logps"),
    FUNCTION: ("ctx", "_new_logps", "_old_logps", "_ref_logps", "_sampling_per_token_logps", "lm_head", "_input_ids",
               "_mask", "_advantages", "beta"),
    KERNEL: ("ref", "new", "old", "sampling_per_token_logps", "input_ids", "mask", "beta", "advantages"),
}  # fmt: skip
NEEDS_ENTROPIES_HOOK = "_sage_unsloth_needs_entropies"
ANCHOR_HOOK = "_sage_unsloth_anchor"


class ContractError(RuntimeError):
    """The guided loss cannot be put in place, or was not consulted: Unsloth is not as tested, or is used in another way."""

    def __init__(self, rule: str, *, found: object, expected: object) -> None:
        installed = {
            name: package_version(name) or "not installed"
            for name in ("unsloth", "unsloth_zoo", "trl")
        }
        super().__init__(
            f"{rule}; found {found}, expected {expected}. Installed: "
            + ", ".join(f"{name} {version}" for name, version in installed.items())
            + f". Tested with unsloth and unsloth_zoo {' and '.join(TESTED_VERSIONS)}: install one of these "
            f'(pip install "unsloth=={TESTED_VERSIONS[0]}" "unsloth_zoo=={TESTED_VERSIONS[0]}"), delete the folder '
            "unsloth_compiled_cache, and restart Python."
        )


def load_unsloth() -> types.ModuleType:
    """Import Unsloth, generate its GRPO trainer, and return the module that the generated trainer lives in.

    On a machine without a GPU this sets the variables that Unsloth needs there (`UNSLOTH_ALLOW_CPU=1`; no sequence
    packing, since a plain transformers forward ignores it and would score wrongly; no compilation unless
    `UNSLOTH_COMPILE_DISABLE=0` is set by the caller). `trl.GRPOTrainer` is the generated class afterwards.

    Raises:
        ContractError: Unsloth did not generate a trainer and TRL's own is in its place.
    """
    if not torch.cuda.is_available():
        os.environ["UNSLOTH_ALLOW_CPU"] = "1"
        os.environ["UNSLOTH_GRPO_SEQ_PACKING"] = "0"
        os.environ.setdefault("UNSLOTH_COMPILE_DISABLE", "1")
    importlib.import_module("unsloth")
    import trl

    if not torch.cuda.is_available() and not hasattr(sys.modules[trl.GRPOTrainer.__module__], LOSS):
        rl = importlib.import_module("unsloth.models.rl")
        rl._patch_trl_rl_trainers("grpo_trainer")
    return trainer_module(trl.GRPOTrainer)


def trainer_module(trainer_class: type) -> types.ModuleType:
    """The module of the Unsloth trainer that `trainer_class` is, or derives from.

    Raises:
        ContractError: it is TRL's own trainer, which Unsloth falls back to (with one warning) when generation fails.
    """
    for base in trainer_class.__mro__:
        module = sys.modules.get(base.__module__)
        if module is not None and "compute_loss" in vars(base) and hasattr(module, LOSS):
            return module
    raise ContractError(
        "the trainer must be Unsloth's generated GRPOTrainer, because TRL's own never calls the patched loss "
        "(import unsloth, or call sage_unsloth.load_unsloth(), before trl)",
        found=f"{trainer_class.__module__}.{trainer_class.__qualname__}",
        expected=f"a class whose module defines {LOSS}",
    )


def prepare_for_cpu(model: Any) -> Any:
    """Give a transformers (or peft) model what Unsloth's trainer expects of it; `FastLanguageModel` needs a GPU.

    Also marks the model as loaded in float32 on purpose. Without that mark Unsloth trains a float32 model under float16
    autocast, on a CPU too, where the reference is scored without: policy and reference then differ by 1e-2 nats before
    the first step.
    """
    llama = importlib.import_module("unsloth.models.llama").FastLlamaModel
    model._unsloth_user_float32 = True
    model.for_training = functools.partial(llama.for_training, model)
    model.for_inference = functools.partial(llama.for_inference, model)
    return model


def check_contract(module: types.ModuleType) -> types.FunctionType:
    """Check everything the patch relies on and return the rewritten loss; nothing is replaced.

    Raises:
        ContractError: a name, a parameter, a number of matches or a computed value is not as expected.
    """
    for name, expected in EXPECTED_PARAMETERS.items():
        target = getattr(module, name, None)
        if target is None:
            raise ContractError(
                f"{module.__name__} must define {name}", found="nothing", expected=name
            )
        function = target.forward if name == FUNCTION else target
        found = tuple(inspect.signature(function).parameters)[: len(expected)]
        if found != expected:
            raise ContractError(
                f"{name} must begin with these parameters", found=found, expected=expected
            )
    _check_numbers(getattr(module, KERNEL))
    return _rewritten_loss(module)


@contextmanager
def guided_kl(trainer: Any, guide: Guide) -> Iterator[None]:
    """Within this context, the KL anchor of `trainer` is q·π_ref instead of π_ref.

        with guided_kl(trainer, BranchGuide()):
            trainer.train()

    Each optimizer step logs the metrics of `sage_unsloth.monitor` beside Unsloth's own. The guide's time is
    `trainer.state.global_step`; its noise is drawn from a generator seeded by `trainer.args.seed`, the step, the
    micro-batch and the process, so a resumed run goes on with the same values.

    Args:
        trainer: Unsloth's generated `GRPOTrainer`. Other trainers in the process are not affected.
        guide: any object with the members of `Guide`.

    Raises:
        ValueError: `trainer.beta` is 0, the model is not prepared for Unsloth, the tokenizer has no pad token,
            or the dataset lacks a column.
        TypeError: `guide` is not a guide.
        ContractError: Unsloth is not what was tested, another `guided_kl` is open, or training took a step without
            consulting the guide.
    """
    check_guide(guide, trainer.beta)
    if getattr(trainer.processing_class, "pad_token_id", None) is None:
        raise ValueError(
            "the tokenizer must have a pad token because Unsloth finds completions by it; "
            "got pad_token_id=None; set tokenizer.pad_token before building the trainer"
        )
    module = trainer_module(type(trainer))
    if not hasattr(trainer.model, "for_training"):
        raise ValueError(
            "the model must have for_training and for_inference because Unsloth's trainer calls them; "
            f"{type(trainer.model).__name__} has not; load it by FastLanguageModel.from_pretrained, or without a GPU by "
            "sage_unsloth.models.load_policy, which calls prepare_for_cpu(model)"
        )
    _check_columns(trainer)
    namespace = vars(module)
    if ANCHOR_HOOK in namespace:
        raise ContractError(
            "guided_kl must not be nested, because two guides would multiply",
            found="another guided_kl that is open",
            expected="one at a time",
        )
    rewritten = check_contract(module)
    anchor = _Anchor(trainer, guide)
    watch = _watch(anchor)
    original = namespace[LOSS]
    namespace[NEEDS_ENTROPIES_HOOK] = anchor.needs_entropies
    namespace[ANCHOR_HOOK] = anchor.logps
    namespace[LOSS] = rewritten
    trainer.add_callback(watch)
    try:
        yield
    finally:
        trainer.remove_callback(watch)
        namespace[LOSS] = original
        del namespace[NEEDS_ENTROPIES_HOOK], namespace[ANCHOR_HOOK]


def check_guide(guide: Guide, beta: float) -> None:
    """What can be said before a model is loaded: it is a guide, and there is a KL term for it to shape.

    Raises:
        TypeError: `guide` is not a guide.
        ValueError: `beta` is 0.
    """
    if not isinstance(guide, Guide) or not isinstance(guide.needs_entropies, bool):
        raise TypeError(
            "a guide must have a method log_guide(signals, *, step, max_steps, generator) and a bool needs_entropies; "
            f"got {guide!r}"
        )
    if beta == 0.0:
        raise ValueError(
            "beta must not be 0 because the guide shapes the KL anchor, and beta = 0 drops the KL; "
            f"got beta={beta}; set GRPOConfig(beta=0.05), or train without a guide"
        )


def _check_columns(trainer: Any) -> None:
    """TRL would find a missing column in the middle of the first step."""
    columns = getattr(
        trainer.train_dataset, "column_names", None
    )  # an iterable dataset may not know them
    graded = any(isinstance(reward, SolutionReward) for reward in trainer.reward_funcs)
    for column in ("prompt", "answer") if graded else ("prompt",):
        if columns is not None and column not in columns:
            raise ValueError(
                f"the training dataset must have a column {column!r}; it has {sorted(columns)}; "
                f"rename the column that holds it: dataset.rename_column(..., {column!r})"
            )


class _Anchor:
    """The state of one open `guided_kl`: what the two rewritten expressions call."""

    def __init__(self, trainer: Any, guide: Guide) -> None:
        self.trainer = trainer
        self.guide = guide
        self.consulted = 0
        self._moment: tuple[int, bool] | None = None
        self._micro_batch = 0
        self.metrics = {"train": GuideMetrics(), "eval": GuideMetrics()}

    def needs_entropies(self, trainer: Any) -> bool:
        return trainer is self.trainer and trainer.beta != 0.0 and self.guide.needs_entropies

    def logps(
        self,
        trainer: Any,
        ref_logps: Tensor | None,
        new_logps: Tensor,
        entropies: Tensor | None,
        mask: Tensor,
    ) -> Tensor | None:
        """log q_t + log π_ref(y_t | s_t), (B, T); the reference as it came for another trainer, or without a KL term."""
        if trainer is not self.trainer or trainer.beta == 0.0:
            return ref_logps
        if ref_logps is None:
            raise ContractError(
                "beta is not 0, so reference log-probs must exist", found=None, expected="(B, T)"
            )
        with torch.no_grad():
            signals = TokenSignals(
                new_logps.detach(),
                ref_logps.detach(),
                mask,
                None if entropies is None else entropies.detach(),
            )
            step, max_steps, generator = self._time()
            log_guide = self.guide.log_guide(
                signals, step=step, max_steps=max_steps, generator=generator
            ).detach()
            if log_guide.shape != mask.shape or log_guide.dtype != torch.float32:
                raise ValueError(
                    "log_guide must return a float32 tensor of the mask's shape; got "
                    f"{log_guide.dtype} {tuple(log_guide.shape)} for {tuple(mask.shape)} from {self.guide!r}"
                )
            log_guide = torch.where(mask.bool(), log_guide, 0.0)
            mode = "train" if self.trainer.model.training else "eval"
            gather = self.trainer.accelerator.gather
            self.metrics[mode].add(signals, log_guide, gather, self.trainer._metrics[mode])
            self.consulted += 1
            return ref_logps + log_guide

    def _time(self) -> tuple[int, int, torch.Generator]:
        """Optimizer step, number of steps, and a generator that depends on nothing but seed, step and micro-batch."""
        state, args = self.trainer.state, self.trainer.args
        step, training = state.global_step, self.trainer.model.training
        self._micro_batch = self._micro_batch + 1 if self._moment == (step, training) else 0
        self._moment = (step, training)
        key = (args.seed, step, training, self._micro_batch, self.trainer.accelerator.process_index)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return step, max(state.max_steps, args.max_steps, 1), generator


def _watch(anchor: _Anchor) -> Any:
    """A callback that stops training after the first optimizer step in which the guide was not consulted."""
    from transformers import TrainerCallback

    class GuideWatch(TrainerCallback):
        seen = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if anchor.trainer.beta != 0.0 and anchor.consulted == self.seen:
                raise ContractError(
                    f"every optimizer step must consult the guide; step {state.global_step} did not",
                    found="a loss that bypasses the patched function",
                    expected=f"a call of {LOSS}",
                )
            self.seen = anchor.consulted

    return GuideWatch()


class _Seams(ast.NodeTransformer):
    """Rewrites the two expressions and counts them."""

    def __init__(self) -> None:
        self.conditions = 0
        self.calls = 0

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == "_need_entropy":
            asks = f"({ast.unparse(node.value)}) or {NEEDS_ENTROPIES_HOOK}(trainer)"
            node.value = ast.copy_location(ast.parse(asks, mode="eval").body, node.value)
            self.conditions += 1
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == f"{FUNCTION}.apply":
            found = tuple(ast.unparse(argument) for argument in node.args[:9])
            expected = ("new_logprobs", "old_logps", "ref_logps", "sampling_per_token_logps", "lm_head",
                        "completion_input_ids", "completion_mask", "advantages", "trainer.beta")  # fmt: skip
            if found != expected:
                raise ContractError(
                    f"{FUNCTION}.apply must be called with these", found=found, expected=expected
                )
            anchor = (
                f"{ANCHOR_HOOK}(trainer, ref_logps, new_logprobs, "
                "new_entropies if _need_entropy else None, completion_mask)"
            )
            node.args[2] = ast.copy_location(ast.parse(anchor, mode="eval").body, node.args[2])
            self.calls += 1
        return node


def _rewritten_loss(module: types.ModuleType) -> types.FunctionType:
    """`grpo_accumulated_loss` with the two seams in it, over the same globals and with the same line numbers."""
    original = getattr(module, LOSS)
    if not isinstance(original, types.FunctionType) or original.__closure__:
        raise ContractError(
            f"{LOSS} must be a plain function", found=repr(original), expected="a function"
        )
    tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    seams = _Seams()
    tree = seams.visit(tree)
    found = {"_need_entropy = …": seams.conditions, f"{FUNCTION}.apply(…)": seams.calls}
    expected = dict.fromkeys(found, 1)
    if found != expected:
        raise ContractError(f"{LOSS} must contain each seam once", found=found, expected=expected)
    ast.increment_lineno(ast.fix_missing_locations(tree), original.__code__.co_firstlineno - 1)
    compiled = compile(tree, original.__code__.co_filename, "exec")
    code = next(
        c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == LOSS
    )
    rewritten = types.FunctionType(code, vars(module), LOSS, original.__defaults__)
    rewritten.__kwdefaults__ = original.__kwdefaults__
    rewritten.__module__ = original.__module__
    return rewritten


def _check_numbers(kernel: Any) -> None:
    """Unsloth's loss and gradient, with the anchor shifted, against the plain-torch reference on a (2, 3) batch."""
    ref = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, -4.0]], dtype=torch.float64)
    log_guide = torch.tensor([[0.3, 0.0, -0.4], [0.1, 0.2, 0.0]], dtype=torch.float64)
    start = ref + torch.tensor([[0.2, -0.1, 0.3], [0.0, 0.4, 0.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([0.7, -0.7], dtype=torch.float64)

    theirs = start.clone().requires_grad_()
    found = kernel(ref + log_guide, theirs, None, None, torch.zeros_like(mask), mask, 0.05, advantages, loss_type="grpo",
                   epsilon_low=0.2, epsilon_high=0.2)[0]  # fmt: skip
    ours = start.clone().requires_grad_()
    expected = grpo_loss(ours, ref, mask, advantages, log_guide=log_guide, beta=0.05)
    found.backward()
    expected.backward()
    if not (
        torch.allclose(found, expected, atol=1e-7)
        and torch.allclose(theirs.grad, ours.grad, atol=1e-7)
    ):
        raise ContractError(
            f"{KERNEL} must compute the loss with KL = exp(d) − d − 1, d = ref − new",
            found=f"loss {found.item():.8f}, gradient {theirs.grad.flatten().tolist()}",
            expected=f"loss {expected.item():.8f}, gradient {ours.grad.flatten().tolist()}",
        )
