"""Pages of a listing, made from a store's objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dcp_s3.store import ListedObject, Page


def make_page(
    objects: Iterable[ListedObject], prefix: str, delimiter: str, token: str | None, size: int, now: float
) -> Page:
    """A page as S3 would give it.

    Args:
        objects: the store's objects, in any order.
        delimiter: see `Store.page`.
        token: the last entry of the page before, None for the first page.
        size: most entries of a page.
        now: the time, in seconds since the epoch.
    """
    entries: dict[str, ListedObject | None] = {}  # None: a common prefix
    for each in sorted(objects, key=lambda each: each.key.encode("utf-8", "surrogatepass")):
        if not each.key.startswith(prefix):
            continue
        end = each.key.find(delimiter, len(prefix)) if delimiter else -1
        name = each.key if end < 0 else each.key[: end + len(delimiter)]
        if token is None or _order(name) > _order(token):
            entries.setdefault(name, each if end < 0 else None)
    names = list(entries)[:size]
    found = [(name, entries[name]) for name in names]
    return Page(
        tuple(each for _, each in found if each is not None),
        tuple(name for name, each in found if each is None),
        names[-1] if len(entries) > size else None,
        now,
    )


def _order(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
