"""Requests for tokens with HuggingFace's meaning: what is given, which loop runs it, and many sequences over one session."""
