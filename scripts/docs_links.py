"""For mkdocs: what a page links to outside of docs/ is not part of the site, so the link becomes text that names the file."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page. Links that stay inside docs/, and code, are left alone."""
    depth = page.file.src_uri.count("/")
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else OUTSIDE.sub(lambda m: _named(m, depth), part) for part in parts)


def _named(match: re.Match[str], depth: int) -> str:
    """``[text](../path)`` as text, where that many steps up leave docs/."""
    up = match[0].count("../")
    return match[0] if up <= depth else f"{match[1]} (`{match[2]}` in the repository)"
