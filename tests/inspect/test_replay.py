"""Replays of runs whose runner needs no model: what is reported, refused, compared and recorded."""

import json
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from inferkit import cli
from inferkit.core.file_identity import facts_of

RUNNER = """
import json
from pathlib import Path
from inferkit.core.errors import WorkerError

class Runner:
    '''Generates for every line of the data set a token that follows from the run's seed.'''

    def run(self, config, *, run_dir):
        lines = Path(config.data.dataset_path).read_text().splitlines()
        if "broken" in lines[0]:
            raise WorkerError("rank 0: it broke")
        seed = (config.data.run_seed or 0) % 1000
        with (run_dir / "generations.jsonl").open("w") as file:
            for number, line in enumerate(lines):
                tokens = [seed, len(line)]
                file.write(json.dumps({"request_id": number, "token_ids": tokens}) + "\\n")
        return {}
"""
WORDS = [
    "runner._target_=replayed.Runner",
    "allowed_targets=[replayed]",
    "data.temperature=1",
    "data.dataset=jsonl",
    "data.dataset_path=prompts.jsonl",
    "hydra.run.dir=first",
]
Replay = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was started, in a folder `first`; its data set has two prompts."""
    home = tmp_path_factory.mktemp("recorded")
    (home / "replayed.py").write_text(textwrap.dedent(RUNNER))
    (home / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.syspath_prepend(str(home))
        assert cli.run(WORDS) == 0
    return home


@pytest.fixture
def first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of that run, at a place that is the test's own."""
    own = Path(shutil.copytree(home, tmp_path / "home"))
    facts = own / "first" / "provenance.json"
    facts.write_text(facts.read_text().replace(str(home), str(own)))
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.delitem(sys.modules, "replayed", raising=False)
    return own / "first"


@pytest.fixture
def replay(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Replays from another folder than that of the run; returns exit code and what was printed."""

    def call(folder: Path, *words: str) -> tuple[int, str]:
        elsewhere = folder.parent.parent / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        monkeypatch.chdir(elsewhere)
        capfd.readouterr()
        code = cli.run(["replay", str(folder), *words])
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return call


def provenance(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "provenance.json").read_text()))


def test_the_same_tokens_come_again(first: Path, replay: Replay, tmp_path: Path) -> None:
    code, text = replay(first, "--output", "again")

    again = tmp_path / "elsewhere" / "again"
    assert code == 0, text
    assert text == (
        f"replay of {first}\n"
        "  code, versions, model, data set, environment and host are as recorded\n"
        f"replaying in {again}\n"
        "same tokens: 2 of 2 requests\n"
    )
    for name in ("config.resolved.yaml", "origins.json", "generations.jsonl", "code.json"):
        assert (again / name).read_bytes() == (first / name).read_bytes(), name
    facts, before = provenance(again), provenance(first)
    assert facts["replay"] == {
        "of": str(first),
        "changes": [],
        "same_tokens": True,
        "differences": [],
    }
    for name in ("command", "overrides", "choices", "identity", "cwd"):
        assert facts[name] == before[name], name
    assert replay(again)[0] == 0, "a replay can be replayed"
    assert (tmp_path / "elsewhere" / "outputs").is_dir()


def test_what_differs_is_told_first(
    first: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first.parent / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "other"}\n')
    (first.parent / "replayed.py").write_text(textwrap.dedent(RUNNER) + "\n")
    changed = provenance(first)
    versions, host = changed["versions"], changed["host"]
    assert isinstance(versions, dict) and isinstance(host, dict)
    versions["torch"], host["name"] = "1.0", "elsewhere"
    (first / "provenance.json").write_text(json.dumps(changed))
    code_file = first / "code.json"
    code_file.write_text(json.dumps(json.loads(code_file.read_text()) | {"cli.py": "0"}))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")

    code, text = replay(first)

    assert code == 1, text
    lines = text.splitlines()
    assert lines[1] == "  differs from then:"
    assert lines[2].startswith("    code inferkit ")
    assert lines[2].endswith("; 1 file: cli.py")
    assert lines[3].split() == ["version", "torch", "1.0", "->", metadata.version("torch")]
    assert lines[4].split(maxsplit=2) == ["code", "replayed", "other contents"]
    assert lines[5].split() == ["data", "set", "prompts.jsonl", "other", "contents"]
    assert lines[6].split(maxsplit=2) == ["environment", "OMP_WAIT_POLICY", "not set -> PASSIVE"]
    assert lines[7].split()[:4] == ["host", "name", "elsewhere", "->"]
    assert lines[-2:] == ["other tokens: 1 of 2 requests", "  request 1: token 1 is 19, was 16"]


def test_a_replay_that_fails_has_no_verdict(first: Path, replay: Replay) -> None:
    (first.parent / "prompts.jsonl").write_text("broken\n")

    code, text = replay(first)

    assert code == 2
    assert "inferkit: rank 0: it broke\n" in text
    assert "no verdict: the replay did not come to its end, see " in text


@pytest.mark.parametrize(
    ("lines", "status", "left"),
    [
        (None, "failed", "neither generations.jsonl nor requests.jsonl (it ended as failed)"),
        (None, "ok", "neither generations.jsonl nor requests.jsonl (it ended as ok)"),
        ("", "interrupted", "no request that was finished (it ended as interrupted)"),
    ],
)
def test_a_run_without_tokens_is_refused_before_it_runs(
    first: Path, replay: Replay, lines: str | None, status: str, left: str
) -> None:
    (first / "generations.jsonl").unlink()
    if lines is not None:
        (first / "generations.jsonl").write_text(lines)
    result = json.loads((first / "result.json").read_text())
    (first / "result.json").write_text(json.dumps(result | {"status": status}))

    code, text = replay(first)

    assert code == 2
    assert text.startswith(
        f"inferkit: {first} cannot be replayed: it has left {left}, so there is nothing to "
        "compare\nits command was: "
    )
    assert "runner._target_=replayed.Runner" in text
    assert not (first.parent.parent / "elsewhere" / "outputs").exists()


@pytest.mark.parametrize("name", ["mymodel", "my/model"])
def test_a_model_that_was_a_folder_is_not_looked_for_on_a_hub(
    first: Path, replay: Replay, name: str
) -> None:
    file = first / "config.resolved.yaml"
    values = yaml.safe_load(file.read_text())
    values["model"]["path"] = name
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    facts = provenance(first)
    identity = facts["identity"]
    assert isinstance(identity, dict)
    identity["model"] = {"config.json": {"size": 2, "sha256": "ab"}}
    (first / "provenance.json").write_text(json.dumps(facts))

    code, text = replay(first)

    assert code == 2
    assert text == (
        f"inferkit: {first} cannot be replayed: model.path={name} is no more there\n"
        f"looked for {first.parent / name}; put the model back to this place\n"
    )
    assert not (first.parent.parent / "elsewhere" / "outputs").exists()


def test_changed_weights_are_told(first: Path, replay: Replay) -> None:
    """Same size, same header: only the data differs."""
    model = first.parent / "mymodel"
    model.mkdir()
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    shape |= {"num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 512}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
    (model / "config.json").write_text(json.dumps(config))
    weights = model / "model.safetensors"
    weights.write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(100))
    file = first / "config.resolved.yaml"
    values = yaml.safe_load(file.read_text())
    values["model"]["path"] = "mymodel"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    facts, recorded = provenance(first), facts_of([model / "config.json", weights])
    identity = facts["identity"]
    assert isinstance(identity, dict)
    identity["model"] = {"config.json": recorded[0], "model.safetensors": recorded[1]}
    (first / "provenance.json").write_text(json.dumps(facts))
    assert "are as recorded" in replay(first)[1]

    with weights.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")

    assert "    model model.safetensors  other contents\n" in replay(first)[1]


def test_options_of_today_do_not_matter(first: Path, replay: Replay) -> None:
    """Nothing is composed: a replay of what no command line gives any more is still that."""
    file = first / "config.resolved.yaml"
    values = yaml.safe_load(file.read_text())
    values["scheduler"]["batch_size"] = 5
    file.write_text(yaml.safe_dump(values, sort_keys=False))

    code, _ = replay(first, "--output", "again")

    assert code == 0
    again = first.parent.parent / "elsewhere" / "again" / "config.resolved.yaml"
    assert yaml.safe_load(again.read_text()) == values


def test_keys_of_another_version(first: Path, replay: Replay) -> None:
    file = first / "config.resolved.yaml"
    text = file.read_text()
    file.write_text(text.replace("  warm_up: true\n", "  warm_up: true\n  old_key: 1\n"))
    code, shown = replay(first)
    assert code == 2
    assert f"{first} cannot be replayed by this version of inferkit:" in shown
    assert "  there is no key engine.old_key\n" in shown
    assert "git worktree add" in shown

    file.write_text(text.replace("  warm_up: true\n", ""))
    code, shown = replay(first)
    assert code == 0
    assert "configuration  engine.warm_up not recorded: the schema's default is taken" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("  path: pypi:", "  path: /no/such/place/"), "model.path=/no/such/place/"),
        (("  block_size: 128", "  block_size: 0"), "kv_cache.block_size=0"),
    ],
)
def test_what_cannot_run_here_is_refused(
    first: Path, replay: Replay, change: tuple[str, str], message: str
) -> None:
    file = first / "config.resolved.yaml"
    file.write_text(file.read_text().replace(*change))

    code, text = replay(first)

    assert code == 2
    assert f"{first} cannot be replayed here, 1 fault" in text
    assert message in text
    assert not (first.parent.parent / "elsewhere" / "outputs").exists()


def test_words_that_are_no_run(first: Path, replay: Replay) -> None:
    home = first.parent

    assert replay(home / "nothing") == (
        2,
        f"inferkit: {home / 'nothing'} is no folder; give the folder of a run, such as "
        "outputs/...\n",
    )
    code, text = replay(home)
    assert (code, text.strip()) == (
        2,
        f"inferkit: {home} holds no config.resolved.yaml, so it is no folder of a run",
    )
    (home / "node1").mkdir()
    (home / "node1" / "config.resolved.yaml").write_text("")
    assert replay(home)[1].strip().endswith(f"one node of several; name {home / 'node1'}")
    shutil.rmtree(home / "node1")
    (home / "multirun.yaml").write_text("")
    assert replay(home)[1].strip().endswith(f"is a sweep; name one of its cells, such as {first}")
    assert (
        "is there already; name a new or an empty folder"
        in replay(first, "--output", str(first))[1]
    )
    assert cli.run(["replay"]) == 2
    assert cli.run(["replay", str(first), "data.seed=1"]) == 2
