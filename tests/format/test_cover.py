"""Chunks that overlap or do not fill their tensor, compared with a count of each element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.format.cover import find_flaw

_BOX = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@given(st.lists(_BOX, max_size=5), st.booleans())
def test_any_boxes(boxes: list[tuple[int, int, int, int]], filled: bool) -> None:
    counts = np.zeros((4, 4), int)
    chunks = []
    for a, b, rows, columns in boxes:
        rows, columns = min(rows, 4 - a), min(columns, 4 - b)
        counts[a : a + rows, b : b + columns] += 1
        chunks.append(((a, b), (rows, columns)))
    is_right = bool((counts == 1).all() if filled else (counts <= 1).all())
    assert (find_flaw((4, 4), chunks, filled=filled) is None) == is_right


def test_scalars_and_empty_tensors() -> None:
    assert find_flaw((), [((), ())]) is None
    assert find_flaw((), []) == "has 1 elements, its chunks have 0"
    assert find_flaw((), [((), ()), ((), ())]) == "has 1 elements, its chunks have 2"
    assert find_flaw((0, 3), []) is None
    assert find_flaw((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))]) is None
