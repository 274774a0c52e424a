import json
from pathlib import Path

import pytest

from inferkit.config.arguments import parse_arguments
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.inspect.diff import verb
from inferkit.inspect.diff.sources import override_words, take_side, take_sides

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def space() -> ConfigSpace:
    return ConfigSpace()


@pytest.fixture(autouse=True)
def somewhere(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  ", []),
        ("+role=prefill  parallel=tp16", ["+role=prefill", "parallel=tp16"]),
        (
            'cluster.prefill_overrides="a=1 b=2" c=3',
            ['cluster.prefill_overrides="a=1 b=2"', "c=3"],
        ),
        ("model.name='it\\'s one' a=1", ["model.name='it\\'s one'", "a=1"]),
        ("'a=1 2' \"b=3\"", ["a=1 2", "b=3"]),
        ("~model.arch.x a=[1,2]", ["~model.arch.x", "a=[1,2]"]),
        ("a=1 b", None),
        ("a='1", None),
        ("outputs/one", None),
    ],
)
def test_words_of_an_override_set(text: str, words: list[str] | None) -> None:
    assert override_words(text) == words


def test_a_side_is_a_set_of_overrides(space: ConfigSpace) -> None:
    side = take_side(" parallel=tp2  data.limit=3 ", space)

    assert side.title == "parallel=tp2  data.limit=3"
    assert side.leaves["data.limit"].value == 3
    assert take_side("", space).title == "defaults"


def test_a_side_is_a_file_with_some_keys(space: ConfigSpace) -> None:
    Path("some.yaml").write_text("data:\n  limit: 3\n")

    side = take_side("some.yaml", space)

    assert side.title == "some.yaml"
    assert side.leaves["data.limit"].origins[-1].place == "some.yaml:2"


@pytest.mark.parametrize(
    ("file", "title"),
    [
        ("conf/parallel/tp16.yaml", "parallel=tp16"),
        ("inferkit/conf/role/decode.yaml", "+role=decode"),
        ("conf/config.yaml", "defaults"),
        ("conf/disagg/transfer/tcp.yaml", "disagg/transfer=tcp"),
    ],
)
def test_a_file_of_a_group_is_its_option(space: ConfigSpace, file: str, title: str) -> None:
    assert take_side(str(ROOT / file), space).title == title


def test_a_file_of_the_users_own_group_is_its_option(tmp_path: Path) -> None:
    Path("own/parallel").mkdir(parents=True)
    Path("own/parallel/mine.yaml").write_text("world_size: 2\n")

    side = take_side("own/parallel/mine.yaml", ConfigSpace(config_dir=Path("own")))

    assert side.title == "parallel=mine"
    assert side.leaves["parallel.world_size"].value == 2


def test_a_cluster_alone_is_its_prefill_and_its_decode(space: ConfigSpace) -> None:
    word = '+role=cluster cluster.decode_overrides="parallel=tp2 scheduler.batch_size=2"'

    prefill, decode = take_sides([word], space)

    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.title == f"prefill of {word}"
    sizes = [side.leaves["parallel.world_size"].value for side in (prefill, decode)]
    assert sizes == [1, 2]


def test_the_run_of_a_cluster_alone_is_its_first_instances(space: ConfigSpace) -> None:
    processes = {
        name: {"pid": 1, "run_dir": name}
        for name in ("router", "prefill0", "prefill1", "decode0", "decode1")
    }
    Path("run").mkdir()
    Path("run/provenance.json").write_text(json.dumps({"processes": processes}))
    for role in ("prefill", "decode"):
        Path(f"run/{role}0").mkdir()
        Path(f"run/{role}0/config.resolved.yaml").write_text(f"role: {role}\n")

    sides = take_sides(["run"], space)

    assert [side.title for side in sides] == ["run/prefill0", "run/decode0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"diff takes two sides, A and B; .* diff --help shows them"),
        (
            ["parallel=tp2"],
            r"has one: parallel=tp2; against the defaults it is\n  .* diff '' parallel=tp2\n",
        ),
        ([""], r"has one: the defaults"),
        (
            ["+role=serve", "parallel=tp2", "data.limit=1"],
            r"has 3: \+role=serve, parallel=tp2, data.limit=1; quote the overrides of each; .*\n"
            r"  .* diff '' '\+role=serve parallel=tp2 data.limit=1'",
        ),
        (["none", ""], r"none: there is no such folder or file; a side is a run directory"),
        (["outputs/run2", ""], r"did you mean outputs/run1\?"),
        (["a=1 b", ""], r"a=1 b: cannot be read as overrides: b is no override"),
        (["a='1", ""], r"a='1: cannot be read as overrides: a quote is not closed"),
        (["outputs", ""], r"outputs: is no run directory: it has no config.resolved.yaml"),
    ],
)
def test_what_cannot_be_compared(space: ConfigSpace, words: list[str], message: str) -> None:
    Path("outputs/run1").mkdir(parents=True)

    with pytest.raises(ConfigError, match=message):
        take_sides(words, space)


def test_what_a_cluster_adds_is_not_of_the_command_line(space: ConfigSpace) -> None:
    word = '+role=cluster data.limit=3 cluster.decode_overrides="scheduler.max_new_tokens=5"'

    prefill, decode = take_sides([word], space)

    port = prefill.leaves["disagg.bootstrap_port"]
    assert (port.value, port.origins[-1].kind) == (0, "the cluster")
    assert prefill.choosers["role"][-1].kind == "the cluster"
    assert prefill.leaves["data.limit"].origins[-1].kind == "command line"
    assert decode.leaves["scheduler.max_new_tokens"].origins[-1].kind == "command line"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel=nope", "parallel=nope"], "A does not compose.*\n.*\n.*\nB does not compose"),
        (["paralel=tp2", ""], r"A does not compose: paralel=tp2\n  paralel=tp2: there is no such"),
        (["", "scheduler.batch_size=x"], "B does not compose: .*\n .*must be an integer"),
        (["+role=cluster paralel=tp2"], "A does not compose"),
        (['+role=cluster cluster.decode_overrides="parallel=nope"'], "B does not compose"),
        (['+role=cluster cluster.decode_overrides="a \\\'"'], "its roles cannot be compared"),
    ],
)
def test_a_side_that_does_not_compose_is_not_compared(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verb.run(parse_arguments(words, verb.add_options))


def test_a_side_that_composes_and_cannot_run_is_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["scheduler.batch_size=-1", "scheduler.batch_size=-1"]

    assert verb.run(parse_arguments(words, verb.add_options)) == 0
    assert "A and B: scheduler.batch_size=-1: " in capsys.readouterr().out
