"""Errors that somebody keeps, without the memory that their tracebacks hold."""

from __future__ import annotations


def without_tracebacks(error: BaseException) -> None:
    """Make an error safe to keep: tracebacks hold every caller's variables, and with them the memory that is saved."""
    links, seen = [error], set()
    while links:
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [each for each in (link.__cause__, link.__context__) if each is not None]
