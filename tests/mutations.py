"""Bytes that were valid once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


def mutated(data: bytes, snippets: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """``data`` after a few flipped bits, splices, insertions of ``snippets`` and truncations."""
    place = st.integers(0, max(0, len(data) - 1))
    change = st.one_of(
        st.tuples(st.just("flip"), place, st.integers(0, 7)),
        st.tuples(st.just("set"), place, st.integers(0, 255)),
        st.tuples(st.just("insert"), place, st.sampled_from(list(snippets))),
        st.tuples(st.just("splice"), place, st.tuples(place, st.integers(0, 64))),
        st.tuples(st.just("cut"), place, st.integers(1, 64)),
        st.tuples(st.just("truncate"), place, st.none()),
    )
    return st.lists(change, min_size=1, max_size=4).map(lambda changes: _apply(data, changes))


def _apply(data: bytes, changes: list[tuple[str, int, object]]) -> bytes:
    changed = bytearray(data)
    for kind, where, how in changes:
        at = min(where, len(changed))
        if kind == "insert" and isinstance(how, bytes):
            changed[at:at] = how
        elif kind == "splice" and isinstance(how, tuple):
            changed[at:at] = changed[how[0] : how[0] + how[1]]
        elif kind == "truncate":
            del changed[at:]
        elif isinstance(how, int) and at < len(changed):
            if kind == "flip":
                changed[at] ^= 1 << how
            elif kind == "set":
                changed[at] = how
            else:
                del changed[at : at + how]
    return bytes(changed)
