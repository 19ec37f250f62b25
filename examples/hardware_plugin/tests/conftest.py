"""Lets the tests run from a checkout in which the plugin is not installed."""

import sys

sys.path.insert(0, __file__.rsplit("tests", 1)[0])
