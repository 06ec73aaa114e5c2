"""The options of `train` and `evaluate` that choose a verifier."""

import argparse


def add_verifier(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verifier",
        metavar="NAME",
        help="what makes an answer right: math, number, number:TOLERANCE, text, choice, regex, "
        "json, roles, reasoning-gym, python (programs against tests), or module:function of your "
        "own (default: that of the data, which is math for your own)",
    )
    parser.add_argument(
        "--allow-unconfined",
        action="store_true",
        help="with --verifier python: run programs also where the kernel cannot keep them from "
        "files, network and processes",
    )
