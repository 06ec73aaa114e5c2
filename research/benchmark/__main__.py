"""See `command`."""

import sys

from research.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
