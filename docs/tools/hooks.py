"""What mkdocs does to our Markdown, which is written to be read in the repository as well.

README.md and CONTRIBUTING.md become pages; links that leave docs/ become links of the site, or plain text where the
site has no page; the API reference lists what `dcp_s3.__all__` does, one page for each room that it comes from.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]
#: Files of the repository that are pages of the site, and what they are called there.
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)

#: Pages of the API reference, and the packages of dcp_s3 whose public names they show.
API = {
    "Saving and loading": ("save", "load", "stage", "integrations"),
    "A run of checkpoints": ("manager", "checkpoint"),
    "Catalog and retention": ("retention",),
    "Without a process group": ("offline",),
    "Local shards": ("sharding",),
    "Settings and counters": ("settings", "monitoring", "checkup", "versions"),
}


def public_names() -> dict[str, str]:
    """The module of each public name, read from dcp_s3/__init__.py without importing it."""
    tree = ast.parse((_ROOT / "dcp_s3" / "__init__.py").read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dcp_s3"):
            for alias in node.names:
                submodule = _ROOT / "dcp_s3" / f"{alias.name}.py"
                modules[alias.asname or alias.name] = f"dcp_s3.{alias.name}" if submodule.exists() else str(node.module)
    return {name: module for name, module in modules.items() if not name.startswith("_")}


def api_pages() -> dict[str, str]:
    """The Markdown of each page of the API reference, by its path."""
    names = public_names()
    pages: dict[str, list[str]] = {title: [] for title in API}
    modules = []
    for name, module in sorted(names.items(), key=lambda each: each[0].lower()):
        if module == f"dcp_s3.{name}":
            modules.append(module)
            continue
        room = module.removeprefix("dcp_s3.").partition(".")[0]
        title = next((title for title, rooms in API.items() if room in rooms), "Settings and counters")
        pages[title].append(f"::: {module}.{name}")
    texts = {_slug(title): f"# {title}\n\n" + "\n\n".join(found) + "\n" for title, found in pages.items() if found}
    for module in modules:
        title = module.removeprefix("dcp_s3.").capitalize()
        options = ("show_root_heading: false", "show_root_toc_entry: false", "members_order: source")
        given = "\n".join(("    options:", *(f"      {option}" for option in options)))
        texts[_slug(title)] = f"# {title}\n\n::: {module}\n{given}\n"
    return texts


def _slug(title: str) -> str:
    return f"api/{title.lower().replace(' ', '-')}.md"


def on_config(config: Any) -> Any:
    """Put the API reference into the nav."""
    config.nav = [
        {title: sorted(api_pages()) if value == "API" else value for title, value in each.items()}
        if isinstance(each, dict)
        else each
        for each in config.nav
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    for source, page in _PAGES.items():
        text = re.sub(r"<!--.*?-->\n", "", (_ROOT / source).read_text())
        files.append(File.generated(config, page, content=_linked(text, source)))
    for page, text in api_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point a page's links at pages of the site."""
    source = page.file.src_uri
    return markdown if source in _PAGES.values() or source.startswith("api/") else _linked(markdown, f"docs/{source}")


def _linked(text: str, source: str) -> str:
    """The text of a file of the repository with the links that it needs in its place on the site."""
    here = posixpath.dirname(_on_site(source) or "")

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[3].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        site = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if site is None:
            return match[2]
        path = posixpath.relpath(site, here or ".") + (f"#{anchor}" if anchor else "")
        return f"{match[1]}[{match[2]}]({path})"

    parts = _FENCE.split(text)
    return "".join(part if index % 2 else _LINK.sub(link, part) for index, part in enumerate(parts))


def _on_site(path: str) -> str | None:
    """Where a file of the repository is on the site."""
    if path in _PAGES:
        return _PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None
