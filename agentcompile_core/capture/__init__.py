"""Capture: a model becomes a GraphSet. ``ops`` the operators, ``export`` the tracing, ``importer`` and ``normalize`` the IR."""
