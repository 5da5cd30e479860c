"""Names of objects."""

import pytest

from dcp_s3.format import layout


def test_data_objects_of_two_saves_never_share_a_name() -> None:
    first = layout.data_object(3, 0, layout.new_nonce())
    second = layout.data_object(3, 0, layout.new_nonce())
    assert first != second
    assert first.startswith("__3_0-")
    assert first.endswith(".distcp")


def test_prefix_spread() -> None:
    names = [layout.data_object(rank, 0, "00", prefix_spread=2) for rank in range(200)]
    assert all(len(name.split("/")[0]) == 2 and layout.is_inside(name) for name in names)
    assert len({name.split("/")[0] for name in names}) > 50


def test_manifest_names_round_trip() -> None:
    save_id = layout.new_save_id()
    assert layout.parse_manifest_object(layout.manifest_object(save_id)) == save_id
    assert layout.parse_manifest_object(layout.manifest_object(save_id, 3)) == save_id
    assert layout.parse_manifest_object(".dcp_s3/pin") is None


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../other/x", "a/../../b"])
def test_paths_that_leave_the_checkpoint(path: str) -> None:
    assert not layout.is_inside(path)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00001000", 1000),
        ("step_5", 5),
        ("iter_0000100", 100),
        ("global_step7", 7),
        ("run2-step-9", 9),
        ("final", None),
    ],
)
def test_step_of_a_name(name: str, step: int | None) -> None:
    assert layout.step_of(name) == step
