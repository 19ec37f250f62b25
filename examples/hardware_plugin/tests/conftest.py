"""Lets the tests run from a checkout in which the plugin is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
