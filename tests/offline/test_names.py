"""Names: new ones, and those that are alike."""

from __future__ import annotations

import pytest

from dcp_s3.offline.names import group_alike, new_names, parse_rules, ranges


def test_rules_apply_one_after_the_other() -> None:
    names = ["model.a.0", "model.b.10", "optim.x"]
    rules = parse_rules([r"^model\.=", r"(\d+)$=n\1", "n0=zero"])
    assert new_names(names, rules) == {"model.a.0": "a.zero", "model.b.10": "b.n10", "optim.x": "optim.x"}
    assert new_names(names, {}) == dict(zip(names, names, strict=True))
    assert parse_rules(["(?=x)x=y"]) == {"(?=x)x": "y"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"modle": ""}, r"'modle' matches no name. The closest of 2: 'model.[ab]'"),
        ({r"^model\.c": ""}, r"matches no name. The closest of 2: 'model.[ab]', 'model.[ab]'"),
        ({"[ab]$": "x"}, "'model.a' and 'model.b' would both be called 'model.x'"),
        ({"(": ""}, "cannot rename: missing"),
        ({"a": r"\2"}, "cannot rename: invalid group reference"),
    ],
)
def test_rules_that_cannot_be_meant(rules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_names(["model.a", "model.b"], rules)


@pytest.mark.parametrize(
    ("texts", "message"), [(["x"], "no REGEX=NEW"), (["=x"], "no REGEX"), (["a=", "a=b"], "twice")]
)
def test_texts_that_are_no_rules(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rules(texts)


def test_names_that_differ_in_numbers_are_grouped() -> None:
    names = [(f"layers.{i}.experts.{j}.w", "changed") for i in range(3) for j in (0, 2)] + [("norm", "changed")]
    found = group_alike([*names, ("layers.3.experts.0.w", "gone")])
    assert [(each.label, len(each.names)) for each in found] == [
        ("layers.0..2.experts.0,2.w", 6),
        ("norm", 1),
        ("layers.3.experts.0.w", 1),
    ]
    assert ranges(map(str, range(0, 100, 2))) == "0,2,4,...,98"
    assert group_alike([("a.007", 0), ("a.7", 0)])[0].label == "a.007"
