"""The command `python -m research.cost`."""

import argparse
from itertools import product

from research import command
from research.cost.sizes import LARGE, SMALL
from sage_unsloth.trainers.backends import BACKENDS, UNSLOTH


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(
        "cost",
        "what a guide costs in time and memory, beside GRPO and a loss that keeps all logits",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="minutes on a CPU (the default without a GPU): "
        f"hidden {SMALL.hidden}, length {SMALL.length}",
    )
    parser.add_argument(
        "--hidden", type=int, nargs="+", help=f"hidden sizes ({LARGE.hidden} on a GPU)"
    )
    parser.add_argument(
        "--length", type=int, nargs="+", help=f"completion tokens ({LARGE.length} on a GPU)"
    )
    parser.add_argument("--vocabulary", type=int, nargs="+", help=f"tokens ({LARGE.vocabulary})")
    parser.add_argument(
        "--batch", type=int, nargs="+", help=f"completions of a pass ({LARGE.batch})"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help="algorithms beside grpo, one-pass, and materialised (default: the paper's guides, and "
        "materialised)",
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="over all variants (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="whole optimizer steps of each variant; 0: the loss alone (default: %(default)s)",
    )
    parser.add_argument(
        "--growth",
        action="store_true",
        help="also how cost grows with length, batch, vocabulary, iterations, accumulation",
    )
    parser.add_argument(
        "--log-entropy",
        action="store_true",
        help="every variant asks for entropies, as the training stages do",
    )
    parser.add_argument(
        "--one-pass",
        action="store_true",
        help="every variant but grpo, which stays Unsloth's own, within one_pass_loss",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=UNSLOTH,
        help="whose trainer and loss: Unsloth's, or TRL's own (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    parser.add_argument("--out", default="runs/cost", help="folder (default: %(default)s)")
    parser.set_defaults(act=_act)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """As `sage_unsloth.__main__.main`."""
    return command.run_command(make_parser(), arguments)


def _act(options: argparse.Namespace) -> int:
    from research.cost.report import conditions, tables
    from research.cost.run import measure_costs
    from research.cost.sizes import Size, default_size
    from sage_unsloth.figures import show_table

    default = SMALL if options.small else default_size()
    fields = ("hidden", "vocabulary", "length", "batch")
    values = (getattr(options, name) or [getattr(default, name)] for name in fields)
    report = measure_costs(
        options.out,
        [Size(**dict(zip(fields, row, strict=True))) for row in product(*values)],
        names=options.variants,
        rounds=options.rounds,
        steps=options.steps,
        growth=options.growth,
        threads=options.threads,
        log_entropy=options.log_entropy,
        one_pass=options.one_pass,
        backend=options.backend,
    )
    print(f"\n{conditions(report)}\n")
    for title, rows in tables(report).items():
        print(title)
        show_table(rows)
        print()
    print(f"Written to {options.out}: bench.json, bench.png, bench.csv")
    if not options.growth:
        print("Next: the same with --growth, or other sizes: --hidden 1536 --length 256 512")
    return 0
