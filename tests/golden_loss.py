"""Loss and gradient of Unsloth's own GRPO loss on a fixed batch, and what they were:
`golden_loss.json`.

A new version of Unsloth, TRL or PyTorch may change the loss, and may be right to. It must not do so
unseen. So the float32 bits are kept, for each CPU that they were recorded on (PyTorch's kernels
round as its vector instructions do), and an upgrade that changes one of them fails
`tests/patch/test_versions.py`. Look at what has changed, compare with the oracle (`pytest
tests/patch/test_patch.py`), and where the new value is right, record it:

    python tests/golden_loss.py --record
"""

import argparse
import hashlib
import json
import platform
import struct
import sys
from contextlib import nullcontext
from pathlib import Path

FILE = Path(__file__).with_name("golden_loss.json")
PACKAGES = ("torch", "unsloth", "unsloth_zoo", "trl", "transformers", "peft")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
TOLERANCE = 1e-5  # relative, on a CPU without a record: float32 sums in another order


class Ones:
    """q ≡ 1."""

    needs = frozenset()

    def log_guide(self, signals, *, step, max_steps, generator=None):
        import torch

        return torch.zeros(signals.mask.shape)


def versions() -> dict[str, str | None]:
    from sage_unsloth.runs.record import package_version

    return {name: package_version(name) for name in PACKAGES}


def cpu() -> str:
    """What decides how PyTorch's kernels round: the instructions that it uses, and those that its
    libraries may choose by.
    """
    import torch

    flags = set()
    if sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text()
        line = next(
            (line for line in text.splitlines() if line.startswith(("flags", "Features"))), ""
        )
        flags = {
            flag for flag in line.split() if flag.startswith(("avx", "fma", "amx", "asimd", "sve"))
        }
        vendor = next(
            (
                line.split(":")[1].strip()
                for line in text.splitlines()
                if line.startswith("vendor_id")
            ),
            "",
        )
    else:
        vendor = platform.processor()
    digest = hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()[:8]
    return f"{platform.machine()} {vendor} {torch.backends.cpu.get_cpu_capability()} {digest}"


def kernel_values(kernel) -> dict[str, list[float]]:
    """Loss and gradient of `grpo_compute_loss`, float32, for each loss type: [loss, kl,
    gradient…].
    """
    import torch

    grid = torch.arange(24, dtype=torch.float32).view(4, 6)
    ref = -0.25 - grid * 0.125
    mask = (torch.arange(6) < torch.tensor([6, 4, 1, 5])[:, None]).long()
    old = ref + 0.0625 * (grid % 5 - 2)
    found = {}
    for loss_type in LOSS_TYPES:
        new = (ref + 0.15 * (grid % 7 - 3)).requires_grad_()
        result = kernel(
            ref,
            new,
            old,
            None,
            torch.zeros_like(mask),
            mask,
            0.05,
            torch.tensor([1.0, -1.0, 0.5, -0.5]),
            loss_type=loss_type,
            epsilon_low=0.2,
            epsilon_high=0.2,
            use_bias_correction_kl=False,
            num_items_in_batch=16,
            max_completion_length=6,
        )
        result[0].backward()
        found[loss_type] = [result[0].item(), float(result[2]), *new.grad.flatten().tolist()]
    return found


def trainer_values(trainer, guide=None) -> dict[str, list[float]]:
    """One optimizer step of the generated trainer on a fixed batch: the loss, and sum and norm of
    each gradient.

    The last bit of any gradient shows in its digest, a list of two integers below 2^16.
    """
    import torch
    from transformers import TrainerCallback

    from sage_unsloth.patch.guided import guided_kl

    found = {}
    width = 8
    ids = torch.arange(8 * width).view(8, width) % 37 + 2
    lengths = torch.tensor([8, 3, 5, 1, 7, 8, 2, 4])[:, None]
    mask = (torch.arange(width) < lengths).long()
    completion_ids = torch.where(mask.bool(), ids, 1)
    grid = torch.arange(8 * width, dtype=torch.float32).view(8, width)
    batch = {
        "prompt_ids": ids[:, :5].flip(1),
        "prompt_mask": torch.ones(8, 5, dtype=torch.long),
        "completion_ids": completion_ids,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 0.25, 1.5, -1.25, -0.5]),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": -3.0 - 0.0625 * (grid % 9),
        "old_per_token_logps": -3.25 - 0.0625 * (grid % 7),
    }

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            for name, parameter in trainer.model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.double()
                    digest = hashlib.sha256(parameter.grad.contiguous().numpy().tobytes()).digest()
                    found[name] = [
                        gradient.sum().item(),
                        gradient.norm().item(),
                        *struct.unpack("<2H", digest[:4]),
                    ]

    original = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        loss = original(*args, **kwargs)
        found["loss"] = [loss.item()]
        return loss

    trainer.compute_loss, trainer._prepare_inputs = compute_loss, lambda inputs: dict(batch)
    trainer.add_callback(Gradients())
    with nullcontext() if guide is None else guided_kl(trainer, guide):
        trainer.train()
    return found


def bits(values: dict[str, list[float]]) -> dict[str, str]:
    """The values as the hexadecimal digits of doubles, which hold every float32 exactly."""
    return {name: struct.pack(f">{len(row)}d", *row).hex() for name, row in values.items()}


def numbers(text: str) -> tuple[float, ...]:
    return struct.unpack(f">{len(text) // 16}d", bytes.fromhex(text))


def compare(found: dict[str, dict[str, str]], records: list[dict]) -> str:
    """How `found` compares with the records: "bits" or "tolerance", or an AssertionError that says
    what to do.

    On a CPU with records, the bits must be those of the installed versions, or of the newest ones
    recorded: an upgrade that changes nothing needs no new record. On another CPU the values must
    agree within `TOLERANCE` of the largest in their row.
    """
    installed, here = versions(), cpu()
    of_cpu = [record for record in records if record["cpu"] == here]
    same = [record for record in of_cpu or records if record["versions"] == installed]
    record = (same or of_cpu or records)[-1]
    for kind, expected in record["bits"].items():
        for name in sorted(expected.keys() | found[kind].keys()):
            before, now = expected.get(name), found[kind].get(name)
            if before is None or now is None or not _agree(before, now, bool(of_cpu), kind):
                changed = {
                    package: f"{record['versions'][package]} -> {version}"
                    for package, version in installed.items()
                    if record["versions"][package] != version
                }
                raise AssertionError(
                    f"Unsloth's loss at q = 1 must be what it was; {kind} {name} was "
                    f"{_shown(before)} and is {_shown(now)} "
                    f"({'bit for bit' if of_cpu else f'within {TOLERANCE:g}'}); versions that "
                    f"changed: {changed or 'none'}; "
                    "compare with the oracle (pytest tests/patch/test_patch.py "
                    "tests/objective/test_losses.py), and if the new value is right, "
                    "record it: python tests/golden_loss.py --record"
                )
    return "bits" if of_cpu else "tolerance"


def _agree(before: str, now: str, exactly: bool, kind: str) -> bool:
    if exactly:
        return before == now
    before, now = numbers(before), numbers(now)
    if kind == "trainer":  # without the digest
        before, now = before[:2], now[:2]
    scale = max(map(abs, before)) or 1.0
    return len(before) == len(now) and all(
        abs(a - b) <= TOLERANCE * scale for a, b in zip(before, now, strict=True)
    )


def _shown(text: str | None) -> str:
    return "absent" if text is None else ", ".join(f"{value!r}" for value in numbers(text)[:3])


def measure(module, trainer) -> dict[str, dict[str, str]]:
    return {
        "kernel": bits(kernel_values(module.grpo_compute_loss)),
        "trainer": bits(trainer_values(trainer)),
    }


def read() -> list[dict]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--record", action="store_true", help="keep what is found, for these versions and this CPU"
    )
    options = parser.parse_args()
    import tempfile

    from conftest import build_trainer

    from sage_unsloth.runs.files import write_json
    from sage_unsloth.trainers.loading import load_unsloth

    module = load_unsloth()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(module, build_trainer(folder, max_steps=1, gradient_accumulation_steps=1))
    records = read()
    if options.record:
        key = {"versions": versions(), "cpu": cpu()}
        others = [r for r in records if {k: r[k] for k in key} != key]
        write_json(FILE, [*others, key | {"bits": found}])
        print(f"recorded for {key}")
    else:
        print(f"agrees: {compare(found, records)}")


if __name__ == "__main__":
    main()
