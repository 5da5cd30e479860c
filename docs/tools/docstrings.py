"""For griffe, which reads our docstrings for the API reference: what it does not know of their style.

A line of `Raises:` may be a list of errors; each gets its own docstring's first line. Examples (`>>>`) need no heading.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

_ERRORS = Path(__file__).resolve().parents[2] / "dcp_s3" / "errors.py"
_NAMES = re.compile(r"^( +)(\w+(?:, \w+)*),?$")


def _meanings() -> dict[str, str]:
    classes = (node for node in ast.parse(_ERRORS.read_text()).body if isinstance(node, ast.ClassDef))
    return {
        each.name: (ast.get_docstring(each) or each.name).partition("\n\n")[0].replace("\n", " ") for each in classes
    }


def spelled_out(text: str, meanings: dict[str, str]) -> str:
    """A docstring in the style that griffe knows."""
    lines: list[str] = []
    raising = example = False
    for line in text.splitlines():
        if line.startswith(">>>") and not example:
            lines.append("```python")
            example = True
        elif example and not line.strip():
            lines.append("```")
            example = False
        raising = line.strip() == "Raises:" or (raising and (not line.strip() or line.startswith(" ")))
        match = _NAMES.match(line) if raising else None
        if match is None:
            lines.append(line)
        else:
            lines += [f"{match[1]}{name}: {meanings.get(name, 'as it says.')}" for name in match[2].split(", ")]
    return "\n".join([*lines, "```"] if example else lines)


class Docstrings(griffe.Extension):
    """Spells out all docstrings."""

    def __init__(self) -> None:
        self._meanings = _meanings()

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = spelled_out(obj.docstring.value, self._meanings)
