from collections.abc import Callable
from pathlib import Path

from inferkit.config.check import Checked, Checker
from inferkit.config.memory import mib


def check(checker: Checker, model: Path, *overrides: str) -> Checked:
    return checker.check_overrides(["model=llama", f"model.path={model}", *overrides])


def fault(checked: Checked) -> str:
    (found,) = checked.faults
    return str(found)


def test_weights_that_do_not_fit(checker: Checker, make_model: Callable[..., Path]) -> None:
    checked = check(checker, make_model(), "platform.device_memory=1000")

    assert "model: its weights take" in fault(checked)
    assert "only 1,000 bytes are available" in fault(checked)


def test_one_request_must_fit_beside_the_weights(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    model = make_model()
    weights = check(checker, model).files.weight_bytes("bfloat16")
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
    weights = check(checker, model).files.weight_bytes("bfloat16")

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
    weights = check(checker, model).files.weight_bytes("bfloat16")
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
    weights = checker.check_overrides(base).files.weight_bytes("bfloat16")

    checked = checker.check_overrides([*base, f"platform.device_memory={weights + 40 * 256 * 128}"])

    assert checked.faults == ()


def test_mib() -> None:
    assert mib(999) == "999 bytes"
    assert mib(3 * 2**30) == "3,072 MiB"
