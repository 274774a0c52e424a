import pytest

from inferkit.inspect.diff.compare import compare
from inferkit.inspect.diff.wording import derived_texts
from inferkit.inspect.snapshot import Leaf, Origin, Snapshot
from tests.inspect.diff.snapshots import derived, leaf, snapshot


def keys(left: dict, right: dict) -> list[str]:
    found = compare(snapshot(leaves=left), snapshot(leaves=right))
    return [pair.key for pair in found.leaves]


def test_equal_leaves_with_other_origins_and_choices_have_no_effect() -> None:
    left = snapshot(choices={"parallel": "tp2"}, leaves={"a": leaf(2, "conf/parallel/tp2.yaml:2")})
    right = snapshot(choices={"parallel": "tp1"}, leaves={"a": leaf(2, ":")})

    found = compare(left, right)

    assert not found.has_effect
    assert [(pair.group, pair.left, pair.right) for pair in found.choices] == [
        ("parallel", "tp2", "tp1")
    ]


@pytest.mark.parametrize(
    ("left", "right", "differs"),
    [
        (1, 1.0, False),
        (1, True, True),
        (0, False, True),
        (None, "", True),
        ([1, 2], [1, 2], False),
        ([1, 2], [2, 1], True),
        ("1", 1, True),
    ],
)
def test_which_values_differ(left: object, right: object, differs: bool) -> None:
    assert keys({"a": left}, {"a": right}) == (["a"] if differs else [])


def test_keys_keep_the_order_of_both_sides() -> None:
    left = {"a": 1, "d": {}, "m.x": 1, "z": 1}
    right = {"a": 2, "b": 2, "d": {}, "m.y": 1, "z": 2}

    assert keys(left, right) == ["a", "b", "m.y", "m.x", "z"]


def test_an_empty_dictionary_is_no_difference_beside_entries() -> None:
    assert keys({"arch": {}}, {"arch.a": 1, "arch.b": 2}) == ["arch.a", "arch.b"]
    assert keys({"arch.a": 1}, {"arch": {}}) == ["arch.a"]
    assert keys({"a": 1, "arch": {}}, {"a": 1}) == ["arch"]


def test_choices_are_compared_where_both_are_known() -> None:
    known = snapshot(choices={"model": "a", "role": "prefill"})
    pairs = compare(known, snapshot(choices={"model": "a"})).choices

    assert [(pair.group, pair.left, pair.right) for pair in pairs] == [("role", "prefill", None)]
    assert compare(known, snapshot()).choices == ()


def test_derived_values_are_compared_where_both_are_known() -> None:
    shape = derived("model.parameters", 1)
    one = snapshot(derived=(derived("a", 1), derived("b", 2), shape))
    other = snapshot(derived=(derived("a", 1), derived("c", 2), shape))
    unknown = snapshot(derived=(derived("a", 2),))

    assert [pair.name for pair in compare(one, other).derived] == ["c", "b"]
    assert [pair.name for pair in compare(one, unknown).derived] == ["a"]
    assert compare(one, snapshot()).derived == ()
    assert not compare(one, snapshot()).has_effect


def test_ranks_that_are_alone_are_as_without_a_group() -> None:
    alone = snapshot(derived=(derived("groups.cp_group", [[0], [1]]), derived("x", 1)))
    none = snapshot(derived=(derived("x", 1),))
    pair = snapshot(derived=(derived("groups.cp_group", [[0, 1]]), derived("x", 1)))

    assert compare(alone, none).derived == ()
    assert [found.is_group for found in compare(none, pair).derived] == [True]


def test_faults_of_one_side_are_a_difference_and_warnings_are_none() -> None:
    found = compare(
        snapshot(faults=("both", "mine"), warnings=("w",)), snapshot(faults=("other", "both"))
    )

    assert (found.faults.left, found.faults.right, found.faults.both) == (
        ("mine",),
        ("other",),
        ("both",),
    )
    assert found.has_effect
    assert not compare(snapshot(warnings=("w",)), snapshot()).has_effect
    assert not compare(snapshot(faults=("f\ng",)), snapshot(faults=("f g",))).has_effect


def test_automatic_values_are_compared_as_written_where_a_side_has_faults() -> None:
    key, default = "scheduler.batch_size", Origin(kind="schema", text="", value=0)
    made = Leaf(value=32, origins=(default, Origin(kind="automatic", text="32 * 1", value=32)))
    plain = Leaf(value=0, origins=(default,))

    good, broken = snapshot(leaves={key: made}), snapshot(leaves={key: plain}, faults=("f",))

    assert compare(good, broken).leaves == ()
    assert compare(good, snapshot(leaves={key: 3}, faults=("f",))).leaves != ()
    assert compare(good, snapshot(leaves={key: 32}, faults=("f",))).leaves == ()
    assert compare(good, snapshot(leaves={key: plain})).leaves != ()


def test_resolved_automatic_values_are_compared_whatever_faults_there_are() -> None:
    def run(seed: int) -> Snapshot:
        made = Origin(kind="automatic", text="drawn", value=seed)
        origins = (Origin(kind="schema", text="", value=None), made)
        leaf = Leaf(value=seed, origins=origins)
        return snapshot(leaves={"data.run_seed": leaf}, faults=("KEY is not set",))

    (pair,) = compare(run(1), run(2)).leaves

    assert pair.key == "data.run_seed"
    assert compare(run(1), run(1)).leaves == ()


def test_a_share_of_each_is_a_difference_where_counts_are_equal() -> None:
    half = derived("rank.experts", 8, unit="experts", text="8 of 8 in a layer, 1/2 of each")
    quarter = derived("rank.experts", 8, unit="experts", text="8 of 8 in a layer, 1/4 of each")

    (pair,) = compare(snapshot(derived=(half,)), snapshot(derived=(quarter,))).derived

    assert derived_texts(pair) == ("8, 1/2 of each", "8, 1/4 of each")
    assert compare(snapshot(derived=(half,)), snapshot(derived=(half,))).derived == ()


def test_nothing_is_said_of_keys_where_a_side_composes_to_none() -> None:
    assert compare(snapshot(leaves={"a": 1}), snapshot(faults=("f",))).leaves == ()


def test_metrics_are_no_effect() -> None:
    found = compare(snapshot(metrics={"ttft_s": 1.0}), snapshot(metrics={"ttft_s": 2.0}))

    assert len(found.metrics) == 1
    assert not found.has_effect


def test_what_runs_were_made_with_is_compared_where_both_record_it() -> None:
    left = {"code": "a", "version torch": "1", "version gguf": "1", "host name": "x"}
    right = {"code": "a", "version torch": "2", "environment OMP_X": "1"}

    found = compare(snapshot(circumstances=left), snapshot(circumstances=right))

    assert [(pair.name, pair.left, pair.right) for pair in found.circumstances] == [
        ("version torch", "1", "2"),
        ("version gguf", "1", None),
    ]
    assert not found.has_effect


@pytest.mark.parametrize("name", ["model file model.safetensors", "data 0"])
def test_other_files_of_model_or_data_set_are_a_difference(name: str) -> None:
    """The configuration has only their place: equal keys do not make equal runs."""
    one, other = (snapshot(circumstances={name: text}) for text in ("5 bytes ab", "5 bytes cd"))

    assert compare(one, other).has_effect
    assert not compare(one, one).has_effect
