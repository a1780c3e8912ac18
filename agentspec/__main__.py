"""``python -m agentspec``: the command line."""

import sys

from agentspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
