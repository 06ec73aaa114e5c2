"""The options of `train` and `evaluate` that choose a verifier."""

import argparse


def add_verifier(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verifier",
        metavar="NAME",
        help="how answers are graded: math, number, number:TOLERANCE, text, choice, regex, json, "
        "roles, reasoning-gym, python (programs against tests), or your module:function "
        "(default: that of the data; math for your own data)",
    )
    parser.add_argument(
        "--allow-unconfined",
        action="store_true",
        help="with --verifier python: run programs even if the kernel cannot block their access to "
        "files, network and processes",
    )
