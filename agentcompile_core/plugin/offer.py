"""What everything that a plugin offers has."""

import contextlib
from abc import ABC
from typing import Any, ClassVar


class Offer(ABC):
    """Base of everything a plugin offers: a lower_snake_case name and an integer version that is part of every cache key.

    ``settings_class``: a frozen attrs class with a default for every field, which a section ``[plugin.<name>]`` of a configuration
    file sets. Fields are of type bool, int, float, str or Path, ``| None``, or tuples of one of them; metadata: ``doc`` (a clause for
    ``agentcompile config``), ``user_only`` (a project's file may not set it: what sends data elsewhere, writes files or
    runs programs), ``variable`` (an environment variable of the plugin's own that sets it too). Keys are no settings.
    """

    name: ClassVar[str]  # lower_snake_case, unique in its plugin
    version: ClassVar[int] = 1  # raise it when the same input gives another output
    preference: ClassVar[int] = 0  # where several could serve and nobody is named, the highest is taken; the core's own have -1
    settings_class: ClassVar[type | None] = None
    settings: Any = None  # of settings_class; its defaults until ``configure``

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Give the class the defaults of its settings."""
        super().__init_subclass__(**keywords)
        if "settings_class" in cls.__dict__ and "settings" not in cls.__dict__ and cls.settings_class is not None:
            with contextlib.suppress(TypeError):  # a setting without a default: refused with its name when the plugin is loaded
                cls.settings = cls.settings_class()

    def configure(self, settings: Any) -> None:
        """Take the settings of one run, in the worker too. Called on a copy of this object (``copy.copy``), before anything else."""
        self.settings = settings
