"""Strip the tracebacks from errors that are kept, and so free the memory that they hold."""

from __future__ import annotations


def without_tracebacks(error: BaseException) -> None:
    """Make an error safe to keep. Its tracebacks hold every caller's variables, and so the state being saved."""
    links, seen = [error], set()
    while links:
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [each for each in (link.__cause__, link.__context__) if each is not None]
