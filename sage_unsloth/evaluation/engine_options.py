"""Engine options of a command."""

import argparse
from typing import Any

from sage_unsloth.models.dtypes import DTYPES
from sage_unsloth.sampling.engine_arguments import check_arguments, parse_arguments


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="format of the weights; auto: the model's own (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of vLLM's engine, such as gpu_memory_utilization=0.5 enforce_eager=true "
        "max_num_seqs=64",
    )


def engine_options(options: argparse.Namespace, engine: str) -> dict[str, Any]:
    """The values for `evaluate`.

    Raises:
        ValueError: not NAME=VALUE, an argument that another option decides, or that the installed
            vLLM does not have.
    """
    arguments = parse_arguments(options.engine_set)
    if engine == "vllm":
        check_arguments(arguments)
    return {"dtype": options.dtype, "engine_arguments": arguments}
