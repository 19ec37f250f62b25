"""``python -m agentcompile_core.cli``."""

import sys

from . import main

sys.exit(main())
