"""What capture raises about a model."""


class Unsupported(Exception):
    """The model does something that the captured form cannot express; the text is the reason shown to the user."""


class Unasked(Unsupported, AttributeError):
    """A model asks what stands in for something for what only the real one has; whether it has that may be asked."""
