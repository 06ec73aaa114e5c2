"""One process of a frontier.

python -m research.frontier.worker FOLDER [--sft]
"""

import sys

from research.benchmark.worker import main
from research.frontier.design import FrontierConfig

if __name__ == "__main__":
    main(FrontierConfig, sys.argv[1:])
