"""One process of a frontier.

python -m sage_unsloth.lab.frontier.worker FOLDER [--sft]
"""

import sys

from sage_unsloth.lab.evidence.worker import main
from sage_unsloth.lab.frontier.design import FrontierConfig

if __name__ == "__main__":
    main(FrontierConfig, sys.argv[1:])
