"""Makes ``emulation_fixtures`` importable: importlib mode does not add the test folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
