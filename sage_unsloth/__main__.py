"""The command line: `python -m sage_unsloth quickstart | doctor`."""

import argparse
import logging
import sys


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 for success, 1 for a failed check, 2 for bad input (the message says what to do)."""
    parser = argparse.ArgumentParser(prog="python -m sage_unsloth", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    quickstart = commands.add_parser(
        "quickstart", help="SFT, GRPO, SAGE-Branch and pass@k on the embedded task"
    )
    quickstart.add_argument(
        "--out", default="runs/quickstart", help="folder of the run (default: %(default)s)"
    )
    quickstart.add_argument(
        "--smoke", action="store_true", help="a minute's run that only shows that it works"
    )
    commands.add_parser(
        "doctor", help="versions, device, memory, patch contract: what is missing, and the remedy"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # The two commands load different amounts, so each imports its own.
    if options.command == "doctor":
        from sage_unsloth import doctor

        return 1 if doctor.run() else 0
    from sage_unsloth import quickstart as stage
    from sage_unsloth.patch import ContractError

    try:
        stage.run(options.out, stage.smoke_config() if options.smoke else None)
    except (ValueError, ContractError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
