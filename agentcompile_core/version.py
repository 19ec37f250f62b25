"""The version of the core; part of every bundle and cache key."""

__version__ = "0.1.0"
