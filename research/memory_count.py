"""Counts the live bytes of one training step operation by operation, beside the plan of memory.

    python -m research.memory_count --out data/results/memory

The step is PyTorch's own, of the real shapes, on fake tensors: no weight is allocated and no GPU
is needed. It has transformers' Qwen2 in bfloat16 with an adapter in float32 on all seven linear
maps, scores the reference without gradient, goes through the completions in passes whose graphs all
live until the one backward pass (as in Unsloth's loss), and scores them by Unsloth's functions or
by this package's. Not PyTorch's own are, by size: 4-bit weights (made bfloat16 for each product, in
both directions), attention (which keeps queries, keys, values and its output), and layers whose
inputs wait in the computer's memory. Optimizer and KV cache are not part of it, nor what the
context and the allocator lose.

Each byte count of a step is a straight line in the number of layers (a test has it), so it is taken
at two and at three layers, and extended to the model's.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from research import command
from research.live_bytes import LiveBytes
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.objective.loss import grpo_loss
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.scoring import logps_and_entropies
from sage_unsloth.planning.architecture import Architecture
from sage_unsloth.planning.memory import BYTES_PER_4BIT_WEIGHT, memory_plan
from sage_unsloth.planning.presets import MODELS
from sage_unsloth.planning.setup import Setup
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.trainers.loading import load_unsloth
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.trainer_names import SCORER_WITH_ENTROPY, SCORERS, ZOO

SCORE_KEPT, SCORE_AGAIN, SCORE_ONCE = "logits kept", "logits again", "one pass"
"""Who scores: Unsloth's two functions, and `patch/scoring.py`."""

QWEN_HALF = Architecture(
    num_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=151_936,
    tied_embeddings=True,
    max_position_embeddings=32_768,
)
ARCHITECTURES = {
    "Qwen2.5-0.5B": QWEN_HALF,
    "Qwen2.5-1.5B": MODELS["qwen2.5-math-1.5b-instruct"].architecture,
    "Qwen2.5-7B": MODELS["qwen2.5-math-7b"].architecture,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step.

    Attributes:
        model: of `ARCHITECTURES`.
        bits: of the linear maps' frozen weights, 16 or 4.
        checkpointing: as in `planning.setup.Setup`.
        micro_batch: completions in one pass.
        scorer: `SCORE_KEPT`, `SCORE_AGAIN` or `SCORE_ONCE`.
        guided: log q of Branch is added to the reference.
        prompt, completion: tokens.
        completions: of the step.
    """

    model: str
    bits: int = 16
    checkpointing: str = "unsloth"
    micro_batch: int = 8
    scorer: str = SCORE_AGAIN
    guided: bool = False
    prompt: int = 1024
    completion: int = 1024
    completions: int = 8

    def setup(self, architecture: Architecture) -> Setup:
        """The same step for the plan."""
        return Setup(
            architecture=architecture,
            weight_bits=self.bits,
            max_prompt_length=self.prompt,
            max_completion_length=self.completion,
            num_generations=self.completions,
            micro_batch=self.micro_batch,
            gradient_checkpointing=self.checkpointing,
            recompute_logits=self.scorer != SCORE_KEPT,
        )


class _Product4Bit(torch.autograd.Function):
    """x Wᵀ with W made for the product and thrown away, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.dtype = shape, x.dtype
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ gradient.new_empty(ctx.shape), None, None


class LoraLinear(nn.Module):
    """A frozen linear map with a trained adapter, whose products are in the map's dtype."""

    def __init__(self, linear: nn.Linear, rank: int, bits: int) -> None:
        super().__init__()
        self.shape = (linear.out_features, linear.in_features)
        self.bias, self.bits = linear.bias, bits
        self.weight = linear.weight
        if bits == 4:
            size = round(linear.weight.numel() * BYTES_PER_4BIT_WEIGHT)
            self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self.lora_a = nn.Parameter(torch.zeros(rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == 4:
            result = _Product4Bit.apply(x, self.weight, self.shape)
            result = result if self.bias is None else result + self.bias
        else:
            result = nn.functional.linear(x, self.weight, self.bias)
        a, b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        return result.add_((x @ a.t()) @ b.t())


class _Attention(torch.autograd.Function):
    """The memory of a fused attention: its inputs, its output and a sum for each query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, output, q.new_empty(q.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple:
    return _Attention.apply(q, k, v).transpose(1, 2).contiguous(), None


class _Checkpoint(torch.autograd.Function):
    """A layer that is computed again in the backward pass; its input waits on the GPU or not."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, layer: Callable[[Tensor], Tensor], counter: LiveBytes, host: bool
    ) -> Tensor:
        ctx.layer, ctx.host = layer, host
        ctx.stored = hidden.detach()
        if host:
            with counter.on_host():
                ctx.stored = hidden.detach().clone()
        return layer(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden = (ctx.stored.clone() if ctx.host else ctx.stored).detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(hidden)
        torch.autograd.backward(output, gradient)
        return hidden.grad, None, None, None


class Policy(nn.Module):
    """transformers' Qwen2 without its head's product, with an adapter."""

    def __init__(self, architecture: Architecture, bits: int, rank: int = 8) -> None:
        super().__init__()
        from transformers import AttentionInterface, Qwen2Config, Qwen2Model

        a = architecture
        AttentionInterface.register("counted", _attend)
        settings: dict[str, Any] = dict(
            vocab_size=a.vocab_size,
            hidden_size=a.hidden_size,
            intermediate_size=a.intermediate_size,
            num_hidden_layers=a.num_layers,
            num_attention_heads=a.num_heads,
            num_key_value_heads=a.num_kv_heads,
            max_position_embeddings=a.max_position_embeddings,
            attn_implementation="counted",
            dtype="bfloat16",
        )
        config = Qwen2Config(**settings)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.decoder = Qwen2Model(config).requires_grad_(False)
        finally:
            torch.set_default_dtype(before)
        for module in list(self.decoder.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, LoraLinear(child, rank, bits))
        self.head = self.decoder.embed_tokens.weight
        if not a.tied_embeddings:
            size = (a.vocab_size, a.hidden_size)
            self.head = nn.Parameter(torch.empty(size, dtype=torch.bfloat16), requires_grad=False)

    def hidden(self, ids: Tensor, checkpointing: str, counter: LiveBytes) -> Tensor:
        """The last hidden states, (B, T, H)."""
        decoder = self.decoder
        hidden = decoder.embed_tokens(ids)
        angles = decoder.rotary_emb(hidden, torch.arange(ids.shape[1]).unsqueeze(0))
        if torch.is_grad_enabled():
            hidden.requires_grad_()  # so that the first layer is in the graph, as peft has it
        for layer in decoder.layers:
            call = functools.partial(_call, layer, angles)
            if checkpointing == "none" or not torch.is_grad_enabled():
                hidden = call(hidden)
            else:
                hidden = _Checkpoint.apply(hidden, call, counter, checkpointing == "unsloth")
        return decoder.norm(hidden)


def _call(layer: nn.Module, angles: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
    result = layer(hidden, position_embeddings=angles)
    return result[0] if isinstance(result, tuple) else result


def scorers() -> dict[str, Callable[..., Any]]:
    """(hidden, head, index, chunks) → log-probs, or log-probs and entropies, by name."""
    load_unsloth()
    zoo = importlib.import_module(ZOO)
    selected = getattr(zoo, SCORERS[0])
    again = getattr(zoo, SCORER_WITH_ENTROPY)
    return {SCORE_KEPT: selected, SCORE_AGAIN: again, SCORE_ONCE: logps_and_entropies}


def count_step(
    case: Case,
    architecture: Architecture,
    score: Callable[..., Any],
    plain: Callable[..., Any],
    *,
    fake: bool = True,
) -> dict[str, int]:
    """The bytes of one step: what stays, and the most beside it in each part.

    Args:
        case: the step.
        architecture: shape of the model, with as many layers as are computed.
        score: of the policy.
        plain: of the reference.
        fake: on tensors without values.
    """
    with FakeTensorMode() if fake else nullcontext(), LiveBytes() as counter:
        policy = Policy(architecture, case.bits)
        ids = torch.zeros(case.completions, case.prompt + case.completion, dtype=torch.long)
        mask = torch.ones(case.completions, case.completion)
        advantages = torch.ones(case.completions)
        stays = counter.now
        counter.restart()
        with torch.no_grad():
            ref_logps, _ = _all_logps(case, policy, ids, plain, counter)
        reference = counter.peak - stays
        counter.restart()
        new_logps, entropies = _all_logps(case, policy, ids, score, counter)
        log_guide = None
        if case.guided:
            signals = TokenSignals(new_logps.detach(), ref_logps, mask, entropies)
            log_guide = BranchGuide().log_guide(signals, step=0, max_steps=1)
        loss = grpo_loss(new_logps, ref_logps, mask, advantages, log_guide=log_guide)
        loss.backward()
        gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
        update = counter.peak - stays
        return dict(stays=stays, reference=reference, update=update, gradients=gradients)


def _all_logps(
    case: Case, policy: Policy, ids: Tensor, score: Callable[..., Any], counter: LiveBytes
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the completions, pass by pass, and entropies where the scorer has them."""
    shape = (case.completions, case.completion)
    logps, entropies = [], []
    for part in ids.split(case.micro_batch):
        hidden = policy.hidden(part, case.checkpointing, counter)
        hidden = hidden[:, -case.completion - 1 : -1]
        chunks = len(part) * max(4, ids.shape[1] // 4096)
        result = score(hidden, policy.head, part[:, -case.completion :], chunks)
        if isinstance(result, tuple):
            result, entropy = result
            entropies.append(entropy)
        logps.append(result)
    return torch.cat(logps).view(shape), torch.cat(entropies).view(shape) if entropies else None


def count_case(case: Case, architecture: Architecture, score: Any, plain: Any) -> dict[str, int]:
    """As `count_step`, of all layers."""
    two, three = (
        count_step(case, replace(architecture, num_layers=n), score, plain) for n in (2, 3)
    )
    return {k: two[k] + (architecture.num_layers - 2) * (three[k] - two[k]) for k in two}


def cases() -> list[Case]:
    """What the table shows: each model, then at 7B what changes memory, one thing at a time."""
    seven = Case(model="Qwen2.5-7B")
    return [
        *(Case(model=name) for name in ARCHITECTURES),
        replace(seven, bits=4),
        replace(seven, micro_batch=1, completions=2),
        replace(seven, scorer=SCORE_KEPT),
        replace(seven, scorer=SCORE_ONCE),
        replace(seven, scorer=SCORE_ONCE, guided=True),
        replace(seven, checkpointing="layers"),
        replace(seven, checkpointing="layers", micro_batch=4),
        replace(seven, checkpointing="none", micro_batch=1, completions=1),
        replace(seven, checkpointing="none", micro_batch=1, completions=2),
    ]


def rows(chosen: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Counted bytes of each case."""
    functions = scorers()
    # The sizes of blocks that it takes on a GPU, which fake tensors are not on.
    scoring = sys.modules[logps_and_entropies.__module__]
    blocks = {"BLOCK_NUMBERS": scoring.GPU_BLOCK_NUMBERS}
    with torch.compiler.set_stance("force_eager"), replace_attributes(scoring, **blocks):
        for case in chosen:
            architecture = ARCHITECTURES[case.model]
            counted = count_case(case, architecture, functions[case.scorer], functions[SCORE_KEPT])
            yield {"case": asdict(case), "counted": counted}


def plan_of(case: Case) -> dict[str, float]:
    """What the plan of memory says of the same step."""
    plan = memory_plan(case.setup(ARCHITECTURES[case.model]))
    items = {item.name: item.bytes for item in plan.items}
    return {
        "stays": items["weights"] + items["adapter"],
        "update": items["activations"] + items["logits"] + items["gradients"],
    }


def reason(row: dict[str, Any]) -> str:
    """Why the plan of a case is not what was counted; empty within 10 %."""
    counted, planned = row["counted"]["update"], plan_of(Case(**row["case"]))["update"]
    if abs(planned / counted - 1) <= 0.1:
        return ""
    if planned < counted:
        return "not known"
    if row["case"]["scorer"] == SCORE_KEPT:
        return "the plan adds kept logits to a layer's activations, and the first are gone by then"
    return (
        "the plan adds up what is not held at one moment (a chunk of logits, what is outside the "
        "layers), and its layer has every weight trained"
    )


def markdown_table(result: Sequence[dict[str, Any]]) -> str:
    """The committed result, and what a guide adds at 7B."""
    header = ("model", "bits", "checkpointing", "completions, in one pass", "scorer", "guide")
    header += ("weights, adapter: counted; planned", "update: counted; planned", "why they differ")
    lines = [header, ("---",) * len(header)]
    for row in result:
        case = Case(**row["case"])
        counted, planned = row["counted"], plan_of(case)
        pairs = [
            f"{counted[part] / 2**30:.2f}; {planned[part] / 2**30:.2f}"
            for part in ("stays", "update")
        ]
        of_case = (case.model, str(case.bits), case.checkpointing)
        sizes = (f"{case.completions}, {case.micro_batch}", case.scorer)
        lines.append(of_case + sizes + ("Branch" if case.guided else "–", *pairs, reason(row)))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    plain, guided = (
        next(
            row["counted"]["update"]
            for row in result
            if row["case"]["scorer"] == SCORE_ONCE and row["case"]["guided"] == with_guide
        )
        for with_guide in (False, True)
    )
    guide = (
        f"A guide adds {(guided - plain) / 2**20:.3f} MiB to the peak of a step at 7B with 8 "
        f"completions of 1,024 tokens ({plain / 2**30:.3f} GiB without it)."
    )
    return f"GiB, prompts of 1,024 and completions of 1,024 tokens.\n\n{table}\n\n{guide}"


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser("memory_count", "live bytes of one training step, on fake tensors")
    parser.add_argument("--out", default="runs/memory", help="folder (default: %(default)s)")
    parser.set_defaults(act=_act)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """As `sage_unsloth.__main__.main`."""
    return command.run_command(make_parser(), arguments)


def _act(options: argparse.Namespace) -> int:
    results = []
    for row in rows(cases()):
        results.append(row)
        counted, planned = row["counted"]["update"], plan_of(Case(**row["case"]))["update"]
        print(f"{row['case']}: {counted / 2**30:.2f} GiB counted, {planned / 2**30:.2f} planned")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "count.json", {"rows": results, "environment": environment()})
    print(f"Written to {out}/count.json. Next: python docs/tables.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
