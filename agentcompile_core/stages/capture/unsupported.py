"""What capture raises about a model."""


class Unsupported(Exception):
    """The model does something that the captured form cannot express; the text is the reason shown to the user."""
