"""Cells of the equality matrix of prefill/decode deployments, and a cover of all pairs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tests.e2e import schedules
from tests.e2e.equality import Reference, assert_same_tokens
from tests.parallel.matrix import CHOSEN, NUM_NEW_TOKENS, prompts, shortened
from tests.pd.instances import Deployment, Job, serve_jobs

SPLITS: Mapping[str, tuple[int, Sequence[str]]] = {
    "tp1": (1, ("parallel=tp1",)),
    "tp2": (2, ("parallel=tp2",)),
    "tp4": (4, ("parallel=tp4",)),
    "dp2": (2, ("parallel=dp2",)),
    "dp2tp2": (4, ("parallel=dp2tp2",)),
    "cp2": (2, ("parallel=cp2", "kv_cache.enable_prefix_cache=false")),
}
MODELS: Mapping[str, str] = {
    "llama": "llama",
    "qwen3_moe": "qwen3_moe",
    "gpt_oss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
}
"""Name in a cell -> variant of tests/families.py."""
CHUNKS: Mapping[str, Sequence[str]] = {
    "whole": ("scheduler.enable_chunked_prefill=false",),
    "chunks": ("scheduler.max_prefill_tokens=11",),
}
ENGINES: Mapping[str, str] = {
    "shm": "inferkit.kv_transfer.engines.shared_memory.SharedMemoryEngine",
    "tcp": "inferkit.kv_transfer.engines.tcp.TcpEngine",
}
VALUES: Mapping[str, Sequence[Any]] = {
    "model": list(MODELS),
    "prefill": list(SPLITS),
    "decode": [split for split in SPLITS if split != "cp2"],
    "topology": ["1p1d", "1p2d", "2p1d", "2p2d"],
    "block_size": [1, 16, 128],
    "chunks": list(CHUNKS),
    "engine": list(ENGINES),
    "digest": [False, True],
    "retracts": [False, True],
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    model: str = "llama"
    prefill: str = "tp1"
    decode: str = "tp1"
    topology: str = "1p1d"
    block_size: int = 16
    chunks: str = "chunks"
    engine: str = "shm"
    digest: bool = False
    retracts: bool = False
    """Decode has blocks for the longest request and little more."""

    def __str__(self) -> str:
        words = [f"{self.model}-{self.prefill}-{self.decode}-{self.topology}-b{self.block_size}"]
        words += [self.chunks, self.engine]
        words += [name for name in ("digest", "retracts") if getattr(self, name)]
        return "-".join(words)

    @property
    def world_size(self) -> int:
        prefills, decodes = self.counts
        return prefills * SPLITS[self.prefill][0] + decodes * SPLITS[self.decode][0]

    @property
    def counts(self) -> tuple[int, int]:
        return int(self.topology[0]), int(self.topology[2])


Pairs = set[tuple[tuple[str, Any], ...]]


def pairs_of(values: Mapping[str, Any]) -> Pairs:
    """All pairs of (field, value), fields in alphabetical order."""
    return set(itertools.combinations(sorted(values.items()), 2))


def covering(values: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Few cells, among which any two values of two fields come together at least once."""
    missing: Pairs = set()
    for a, b in itertools.combinations(sorted(values), 2):
        for va, vb in itertools.product(values[a], values[b]):
            if is_allowed({a: va, b: vb}):
                missing.add(((a, va), (b, vb)))
    cells = []
    while missing:
        chosen = dict(min(missing, key=repr))
        for name in values:
            if name not in chosen:
                trials = [chosen | {name: value} for value in values[name]]
                allowed = [trial for trial in trials if is_allowed(trial)]
                gains = [len(pairs_of(trial) & missing) for trial in allowed]
                chosen = allowed[gains.index(max(gains))]
        missing -= pairs_of(chosen)
        cells.append(Cell(**chosen))
    return cells


def is_allowed(values: Mapping[str, Any]) -> bool:
    """More than eight processes tell nothing new. Blocks run short only where one rank has all
    requests at about the same time, and each token takes a block."""
    known = {f.name: f.default for f in fields(Cell)} | dict(values)
    retracts_in_vain = known["retracts"] and (
        values.get("block_size", 1) != 1
        or values.get("decode", "tp1") not in ("tp1", "tp2", "tp4")
        or values.get("topology", "1p1d")[2] != "1"
        or values.get("chunks", "whole") != "whole"
    )
    return Cell(**known).world_size <= 8 and not retracts_in_vain


FEW_BLOCKS = 50
"""Of one token each: the longest request may take 41, and all prompts together take 76."""
COVER = covering(VALUES)
SQUARE = [
    Cell(model=model, prefill=prefill, decode=decode, block_size=block_size)
    for model in MODELS
    for prefill in ("tp1", "tp2", "tp4")
    for decode in ("tp1", "tp2", "tp4")
    for block_size in (1, 16, 128)
]
DEFAULT = [
    Cell(),
    Cell(prefill="tp2", decode="tp1", block_size=1, engine="tcp", digest=True),
    Cell(prefill="tp1", decode="tp2", model="gpt_oss", block_size=1, chunks="whole", retracts=True),
    Cell(prefill="cp2", decode="tp1", model="deepseek_v3", block_size=128, chunks="whole"),
]
CELLS_BY_NAME = {str(cell): cell for cell in (*DEFAULT, *COVER, *SQUARE)}


def check(pools: Any, cell: Cell, option: str, folder: Any, reference: Reference) -> None:
    """Generate through the deployment of a cell and compare with transformers."""
    num_prefills, num_decodes = cell.counts
    common = [
        f"model={option}",
        f"model.path={folder}",
        "model.dtype=float32",
        "scheduler.batch_size=8",
        f"engine.max_model_len={schedules.MAX_MODEL_LEN}",
        f"kv_cache.block_size={cell.block_size}",
        "engine.warm_up=false",
        f"disagg.transfer._target_={ENGINES[cell.engine]}",
        f"disagg.verify_digest={cell.digest}",
    ]
    decode_only = []
    if cell.retracts:
        decode_only = [
            f"kv_cache.num_blocks={FEW_BLOCKS}",
            "kv_cache.host_bytes=100000000",
            "scheduler.num_reserved_decode_tokens=0",
        ]
    (prefill_size, prefill_words), (decode_size, decode_words) = (
        SPLITS[cell.prefill],
        SPLITS[cell.decode],
    )
    deployment = Deployment(
        prefills=[(prefill_size, [*prefill_words, *CHUNKS[cell.chunks]])] * num_prefills,
        decodes=[(decode_size, [*decode_words, *decode_only])] * num_decodes,
        common=common,
    )
    jobs = [
        Job(
            room=_room(idx, num_prefills),
            token_ids=token_ids,
            max_tokens=NUM_NEW_TOKENS,
            prefill=idx % num_prefills,
            decode=(idx // num_prefills) % num_decodes,
        )
        for idx, token_ids in enumerate(prompts())
    ]
    answers, ranks = serve_jobs(pools, deployment, jobs)
    assert set(answers) == {job.room for job in jobs}
    for idx, (tokens, gaps, _) in enumerate(shortened(reference)):
        answer = answers[_room(idx, num_prefills)]
        assert answer["finish_reason"] in ("length", "stop"), answer
        assert_same_tokens(answer["tokens"], tokens, gaps, case=f"{cell} prompt {CHOSEN[idx]}")
    if cell.retracts:
        retractions = [answer["num_retractions"] for answer in answers.values()]
        assert sum(retractions) > 0, "nothing was retracted"
    for name, outputs in ranks.items():
        for output in outputs:
            assert output["stats"].get("dropped_malformed", 0) == 0, name


def _room(idx: int, num_prefills: int) -> int:
    """Every DP rank of every prefill instance gets some."""
    return 100 + 2 * idx + idx // num_prefills % 2
