from collections.abc import Callable
from pathlib import Path

import pytest

from inferkit.config import memory
from inferkit.config.check import Checked, Checker
from inferkit.config.memory import mib
from inferkit.config.space import ConfigSpace


def check(checker: Checker, model: Path, *overrides: str) -> Checked:
    return checker.check_overrides(["model=llama", f"model.path={model}", *overrides])


def fault(checked: Checked) -> str:
    (found,) = checked.faults
    return str(found)


def weight_bytes(checked: Checked) -> int:
    """Of a rank in bfloat16."""
    assert checked.config is not None
    return memory.rank_share(checked.config, checked.files.arch).weight_bytes


def test_weights_that_do_not_fit(checker: Checker, make_model: Callable[..., Path]) -> None:
    checked = check(checker, make_model(), "platform.device_memory=1000")

    assert "model: its weights take" in fault(checked)
    assert "only 1,000 bytes are available" in fault(checked)


def test_one_request_must_fit_beside_the_weights(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    model = make_model()
    weights = weight_bytes(check(checker, model))
    # 256 bytes of KV per token, blocks of 128 tokens, 3 blocks and the null block
    per_block = 256 * 128
    enough = weights + 4 * per_block
    options = ["kv_cache.mem_fraction=1.0", "scheduler.batch_size=1"]

    short = check(checker, model, f"platform.device_memory={enough - 1}", *options)
    exact = check(checker, model, f"platform.device_memory={enough}", *options)

    assert "engine.max_model_len=288: the KV cache of one request takes" in fault(short)
    assert "256 tokens fit" in fault(short)
    assert exact.faults == ()


def test_a_batch_that_must_wait_is_a_warning(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    model = make_model()
    weights = weight_bytes(check(checker, model))

    checked = check(
        checker,
        model,
        f"platform.device_memory={weights + 7 * 256 * 128}",
        "kv_cache.mem_fraction=1.0",
    )

    assert checked.faults == ()
    assert [str(warning) for warning in checked.warnings] == [
        "scheduler.batch_size=32: the KV cache holds 2 requests of engine.max_model_len=288 at "
        "once; others wait"
    ]


def test_a_pool_of_a_given_size_must_fit(checker: Checker, make_model: Callable[..., Path]) -> None:
    model = make_model()
    weights = weight_bytes(check(checker, model))
    memory_size = f"platform.device_memory={weights + 5 * 256 * 128}"

    assert check(checker, model, memory_size, "kv_cache.num_blocks=5").faults == ()
    text = fault(check(checker, model, memory_size, "kv_cache.num_blocks=6"))
    assert "kv_cache.num_blocks=6: the pool takes" in text
    assert "allowed is <= 5" in text


def test_a_sliding_window_needs_less_than_the_whole_request(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    model = make_model("MistralForCausalLM", sliding_window=64, max_position_embeddings=100_000)
    base = ["model=mistral", f"model.path={model}", "engine.max_model_len=50000"]
    weights = weight_bytes(checker.check_overrides(base))

    checked = checker.check_overrides([*base, f"platform.device_memory={weights + 40 * 256 * 128}"])

    assert checked.faults == ()


def test_a_rank_holds_a_share_of_weights_and_cache(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    model = make_model()
    options = ["parallel=tp2", "kv_cache.mem_fraction=1.0", "scheduler.batch_size=1"]
    share = weight_bytes(check(checker, model, *options))
    assert share < weight_bytes(check(checker, model))
    # One KV head of two: 128 bytes of KV per token, 3 blocks and the null block.
    enough = share + 4 * 128 * 128

    exact = check(checker, model, *options, f"platform.device_memory={enough}")
    short = check(checker, model, *options, f"platform.device_memory={enough - 1}")
    tiny = check(checker, model, *options, f"platform.device_memory={share - 1}")

    assert exact.faults == ()
    assert "engine.max_model_len=288: the KV cache of one request takes" in fault(short)
    assert "in bfloat16 on each of 2 ranks, but only" in fault(tiny)
    assert "or another parallel=<option>" in fault(tiny)


@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [
        (["parallel=tp4"], 4),
        (
            [
                "parallel=tp4",
                "parallel.node_ips=[a,b]",
                "parallel.devices_per_node=2",
                "parallel.master_port=29500",
            ],
            2,
        ),
    ],
)
def test_ranks_of_a_node_share_the_memory_of_a_cpu(
    checker: Checker,
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    num_ranks: int,
) -> None:
    model = make_model()
    options = [*options, "kv_cache.mem_fraction=1.0", "scheduler.batch_size=1"]
    share = weight_bytes(check(checker, model, *options))
    # Two KV heads on four ranks: 128 bytes of KV per token, 3 blocks and the null block.
    enough = num_ranks * (share + 4 * 128 * 128)

    monkeypatch.setattr(memory, "available_memory", lambda: enough)
    assert check(checker, model, *options).faults == ()
    monkeypatch.setattr(memory, "available_memory", lambda: enough - num_ranks)
    assert "engine.max_model_len" in fault(check(checker, model, *options))


def test_the_memory_of_this_machine_can_be_left_out_of_it(
    space: ConfigSpace, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    model = make_model()

    assert "only 1,000 bytes are" in fault(check(Checker(space, is_run=False), model))
    other = Checker(space, is_run=False, asks_host=False)
    assert check(other, model).faults == ()
    assert "only 999 bytes are" in fault(check(other, model, "platform.device_memory=999"))


def test_mib() -> None:
    assert mib(999) == "999 bytes"
    assert mib(3 * 2**30) == "3,072 MiB"


def test_a_pool_without_room_for_a_whole_request_is_a_warning(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    # 288 tokens take 3 blocks of 128 tokens, beside the null block.
    model = make_model()
    small = check(checker, model, "kv_cache.num_blocks=3", "scheduler.batch_size=1")
    enough = check(checker, model, "kv_cache.num_blocks=4", "scheduler.batch_size=1")

    (warning,) = (found for found in small.warnings if found.key == "kv_cache.num_blocks")
    assert "takes 3 blocks of 128 tokens" in warning.problem and "set 4 or more" in warning.problem
    assert small.faults == () and enough.faults == ()
    assert not any(found.key == "kv_cache.num_blocks" for found in enough.warnings)
