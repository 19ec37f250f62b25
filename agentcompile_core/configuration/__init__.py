"""Configuration: what is chosen where no argument says it, from files, the environment and the command line.

``values`` what can be set, ``files`` the two toml files, ``environment`` the variables, ``layers`` how they are laid over each
other, and where each effective value comes from.
"""

from .layers import Effective, resolve
from .values import CacheLimits, Config, Sections

__all__ = ["CacheLimits", "Config", "Effective", "Sections", "resolve"]
