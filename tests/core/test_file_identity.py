import hashlib
import os
import time
from pathlib import Path

import pytest

from inferkit.core import file_identity
from inferkit.core.file_identity import SAMPLE_BYTES, facts_of, file_facts

SIZE = 5 << 20


def settled(file: Path, data: bytes | None = None) -> Path:
    """`file` with `data`, as if it were written a minute ago."""
    if data is not None:
        file.write_bytes(data)
    past_ns = time.time_ns() - 60 * 10**9
    os.utime(file, ns=(past_ns, past_ns))
    return file


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "hashes").glob("*"))


def test_every_byte_counts(empty_cache: Path, tmp_path: Path) -> None:
    data = os.urandom(SIZE)
    one = settled(tmp_path / "one.safetensors", data)
    two = settled(tmp_path / "two.bin", data[:-1] + bytes([data[-1] ^ 1]))

    assert file_facts(one) == {"size": SIZE, "sha256": hashlib.sha256(data).hexdigest()}
    assert facts_of([one, two]) == [file_facts(one), file_facts(two)]
    assert file_facts(one)["sha256"] != file_facts(two)["sha256"]


def test_a_hash_is_computed_once_for_a_file_that_stays(empty_cache: Path, tmp_path: Path) -> None:
    file = settled(tmp_path / "model.safetensors", bytes(SIZE))
    found = file_facts(file)
    (entry,) = kept(empty_cache)
    entry.write_text("0" * 64)

    assert file_facts(file)["sha256"] == "0" * 64, "taken from the cache"
    assert file_facts(file.rename(tmp_path / "moved"))["sha256"] == found["sha256"], "ctime differs"


def test_data_that_is_changed_in_place_is_seen(empty_cache: Path, tmp_path: Path) -> None:
    """Even where a tool puts the time of modification back."""
    file = settled(tmp_path / "model.safetensors", bytes(SIZE))
    times = file.stat()
    before = file_facts(file)
    with file.open("r+b") as stream:
        stream.seek(SIZE // 2)
        stream.write(b"x")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert file_facts(file) == {
        "size": SIZE,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    assert file_facts(file) != before


def test_what_was_just_written_and_small_files_are_not_kept(
    empty_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").write_bytes(bytes(SIZE))
    facts_of([tmp_path / "new", settled(tmp_path / "small", b"x")])

    assert kept(empty_cache) == []


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_only(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = settled(tmp_path / "model.safetensors", bytes(SIZE))
    found = file_facts(file)
    (entry,) = kept(empty_cache)
    entry.write_bytes(b"\xff")
    assert file_facts(file) == found

    (tmp_path / "a file").touch()
    monkeypatch.setenv("INFERKIT_CACHE", str(tmp_path / "a file"))
    assert file_facts(file) == found


def test_of_a_large_file_header_and_samples_count(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real limit is 2 GiB; everything else is as it is."""
    monkeypatch.setattr(file_identity, "MAX_WHOLE_BYTES", SIZE - 1)
    monkeypatch.setattr(file_identity, "NUM_SAMPLES", 5)
    header = b'{"a":1}' + b" " * (SAMPLE_BYTES + 100)
    data = len(header).to_bytes(8, "little") + header
    data += bytes(SIZE - len(data))
    last = len(header) + 7

    def facts(position: int | None = None) -> dict[str, object]:
        changed = bytearray(data)
        if position is not None:
            changed[position] ^= 1
        return file_facts(settled(tmp_path / "model.safetensors", bytes(changed)))

    before = facts()
    assert before.keys() == {"size", "sampled_sha256"}
    seen = (0, 8, last, SIZE // 2, SIZE - SAMPLE_BYTES, SIZE - 1)
    assert all(facts(position) != before for position in seen)
    assert facts(last + 1) == before, "between two samples"
