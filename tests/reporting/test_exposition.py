from __future__ import annotations

import math

from dcp_s3.reporting.exposition import Sample, parse_exposition

TEXT = """\
# HELP dcp_s3_saves_total Saves that were committed.
# TYPE dcp_s3_saves_total counter
dcp_s3_saves_total 12
dcp_s3_throttled_requests_total{bucket="a\\"b\\\\c\\nd",endpoint="https://s3"} 3 1700000000000
dcp_s3_last_step{} NaN
dcp_s3_seconds_bucket{le="+Inf"} +Inf
process_cpu_seconds_total 1.5
not a sample at all
dcp_s3_broken{bucket="x"} many
"""


def test_samples_with_labels_times_and_odd_values_are_read() -> None:
    found = parse_exposition(TEXT, "dcp_s3_")
    assert [each.name for each in found] == [
        "dcp_s3_saves_total", "dcp_s3_throttled_requests_total", "dcp_s3_last_step", "dcp_s3_seconds_bucket",
    ]  # fmt: skip
    assert found[0] == Sample("dcp_s3_saves_total", (), 12.0)
    assert found[1].labels == (("bucket", 'a"b\\c\nd'), ("endpoint", "https://s3"))
    assert found[1].value == 3
    assert math.isnan(found[2].value)
    assert found[3].labels == (("le", "+Inf"),)
    assert len(parse_exposition(TEXT)) == 5


def test_a_sample_is_a_line_for_people() -> None:
    assert str(Sample("dcp_s3_saves_total", (), 12.0)) == "dcp_s3_saves_total 12"
    assert str(Sample("dcp_s3_x", (("bucket", "b"),), 0.25)) == "dcp_s3_x (bucket=b) 0.25"
    assert str(Sample("dcp_s3_x", (), math.nan)) == "dcp_s3_x nan"


def test_nonsense_is_no_sample() -> None:
    assert parse_exposition("<html>\n\n{}\n1 2\n") == []
