"""Which files these are: a hash of their contents, computed once and kept in the cache.

A file of up to `MAX_WHOLE_BYTES` counts with every byte. Of a longer one, a shard of a large model,
header and evenly spaced samples count: another training run, conversion or quantisation changes
them; a change that hits none of them and keeps the size is not seen. Torch-free.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

from inferkit.core.model_cache import cache_dir

MAX_WHOLE_BYTES: Final = 2 << 30
NUM_SAMPLES: Final = 64
SAMPLE_BYTES: Final = 64 << 10
HEAD_BYTES: Final = 1 << 20
"""Of a file of another kind than safetensors, this much of its beginning counts as the header."""
MAX_HEADER_BYTES: Final = 100 << 20
"""The longest safetensors header there is; a longer one is no header."""
MIN_KEPT_BYTES: Final = 4 << 20
"""The hash of a smaller file takes less time than a look into the cache is worth."""
SETTLED_S: Final = 2.0
"""A file that was written less long ago may change again within one tick of its clock."""
NUM_THREADS: Final = 4
HASHES: Final = "hashes"
"""Folder of the cache."""


def file_facts(file: Path) -> dict[str, Any]:
    """Size in bytes, and `sha256` of the whole file or `sampled_sha256` of a large one.

    A hash is kept by device, inode, size, and times of modification and change (in ns): what has
    these in common is not read again. Where the cache cannot be written, it is.

    Raises:
        OSError: the file cannot be read.
    """
    before = file.stat()
    name = "sha256" if before.st_size <= MAX_WHOLE_BYTES else "sampled_sha256"
    kept = cache_dir() / HASHES / _key(before, name)
    known = _read(kept) if before.st_size >= MIN_KEPT_BYTES else ""
    found = known or (file_hash(file) if name == "sha256" else _sampled_hash(file, before.st_size))
    if not known and _is_worth_keeping(before) and _key(file.stat(), name) == kept.name:
        _keep(kept, found)
    return {"size": before.st_size, name: found}


def _is_worth_keeping(stat: os.stat_result) -> bool:
    return stat.st_size >= MIN_KEPT_BYTES and time.time() - stat.st_mtime > SETTLED_S


def facts_of(files: Sequence[Path]) -> list[dict[str, Any]]:
    """`file_facts` of several files, some at a time."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(file_facts, files))


def file_hash(file: Path) -> str:
    """sha256 of every byte, computed anew."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sampled_hash(file: Path, size: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(_header(stream, size if file.suffix == ".safetensors" else 0))
        for number in range(NUM_SAMPLES):  # the last one ends with the file
            stream.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _header(stream: IO[bytes], size: int) -> bytes:
    """Of a safetensors file of `size` bytes its header; 0 = of another kind, the beginning."""
    if not size:
        return stream.read(HEAD_BYTES)
    head = stream.read(8)
    return head + stream.read(min(int.from_bytes(head, "little"), size, MAX_HEADER_BYTES))


def _key(stat: os.stat_result, name: str) -> str:
    parts = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, name)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(kept: Path) -> str:
    """A hash that was kept; empty where there is none, or its file is damaged."""
    try:
        text = kept.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if len(text) == 64 else ""


def _keep(kept: Path, found: str) -> None:
    """Write it as a whole, for several processes may do so at once."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", dir=kept.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(found)
        os.replace(name, kept)
