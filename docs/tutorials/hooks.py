"""Hooks of mkdocs: notebooks as pages that load nothing from elsewhere, with links to the other pages."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError

# No option of mkdocs-jupyter switches these off: scripts that import mermaid and MathJax, and the bar of cell tags.
_UNWANTED = (
    re.compile(r'<script type="module">(?:(?!</script>).)*mermaid.*?</script>', re.DOTALL),
    re.compile(r'<!-- Load mathjax -->\s*<script src="[^"]*"[^>]*>\s*</script>'),
    re.compile(r'<script type="text/x-mathjax-config">.*?</script>', re.DOTALL),
    re.compile(r'<div class="celltoolbar">(?:\s*</?(?:div|span)[^>]*>)*?[^<]*(?:\s*</(?:span|div)>){3}\s*</div>'),
)
_LINK = re.compile(r'href="([^":#]+\.md)(#[^"]*)?"')


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Remove what a notebook's page does not need, and resolve its links to other pages."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    for pattern in _UNWANTED:
        html = pattern.sub("", html)

    def resolve(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[1]))
        file = files.get_file_from_path(target)
        if file is None:
            raise PluginError(f"{page.file.src_uri} links to {link[1]}, which is no page")
        return f'href="{file.url_relative_to(page.file)}{link[2] or ""}"'

    return _LINK.sub(resolve, html)
