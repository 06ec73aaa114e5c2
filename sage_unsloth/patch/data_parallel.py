"""Several processes with a whole model in each: what the patch checks of them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sage_unsloth.runs.processes import world_size

if TYPE_CHECKING:
    import torch


def check_data_parallel(accelerator: Any) -> None:
    """Several processes must each hold the whole model.

    Raises:
        ValueError: the model is split among them (FSDP, DeepSpeed), or nothing joins them.
    """
    found = accelerator.num_processes
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if found != world_size() or (found > 1 and kind not in ("MULTI_GPU", "MULTI_CPU")):
        raise ValueError(
            "several processes must be joined by PyTorch's DistributedDataParallel, with the "
            "whole model in each; got "
            f"{kind} with {found} of WORLD_SIZE={world_size()} processes; start all of them with "
            f"torchrun or accelerate launch "
            "--multi_gpu, without FSDP and DeepSpeed"
        )


def check_same_gradients(trainer: Any, parameters: "Iterable[torch.nn.Parameter]") -> None:
    """Before an optimizer step, every process must hold the mean of the gradients.

    Raises:
        ContractError: they differ, so that each process would train a model of its own.
    """
    import torch

    from sage_unsloth.patch.unsloth_names import ContractError

    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    if not squares:
        return
    total = torch.stack(squares).sum().float().unsqueeze(0)
    totals = trainer.accelerator.gather(total)
    if (totals != totals[0]).any() and not totals.isnan().any():
        raise ContractError(
            "the gradients must be averaged over the processes before each optimizer step",
            found=f"squared norms {totals.tolist()}",
            expected="the same in every process",
        )


def pooled_means(result: tuple, mask: "torch.Tensor", accelerator: Any) -> tuple:
    """Unsloth's result with the two means that it logs, completion length and KL, taken over the
    completions of every process.

    Args:
        result: loss, mean length, mean KL and what else Unsloth's function returns.
        mask: of this process's completions, (B, T).
    """
    import torch

    if accelerator.num_processes == 1:
        return result
    loss, length, kl, *rest = result
    rows = torch.tensor(float(len(mask)), device=mask.device)
    kept = (mask.sum(-1) > 0).sum().float()
    sums = accelerator.reduce(
        torch.stack([length.detach() * rows, rows, kl.detach() * kept, kept]), "sum"
    )
    return (loss, sums[0] / sums[1], sums[2] / sums[3].clamp(min=1), *rest)
