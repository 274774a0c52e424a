from dataclasses import replace

from inferkit.config.resolve import CPU_PLATFORM, resolve_automatic
from inferkit.config.schema import (
    DataConfig,
    EngineConfig,
    InferenceConfig,
    PlatformConfig,
    SchedulerConfig,
)


def config(**scheduler: int | bool) -> InferenceConfig:
    return InferenceConfig(
        data=DataConfig(input_truncated_len=100),
        platform=PlatformConfig(_target_="auto"),
        engine=EngineConfig(_target_="x"),
        scheduler=SchedulerConfig(_target_="x", **scheduler),  # type: ignore[arg-type]
    )


def test_automatic_values_become_what_the_schema_says() -> None:
    cfg = config()

    resolved = resolve_automatic(cfg)

    assert resolved.platform._target_ == CPU_PLATFORM
    assert resolved.engine.max_model_len == 100 + 32
    assert resolved.scheduler.batch_size == 32
    assert resolved.scheduler.max_prefill_tokens == 2048
    assert resolved.batch_size_per_dp_rank == 32
    assert resolved.data.seed is None
    assert resolved.kv_cache.num_blocks == 0


def test_the_configuration_itself_stays_as_it_is() -> None:
    cfg = config()
    before = replace(cfg)

    resolve_automatic(cfg)

    assert cfg == before
    assert cfg.scheduler.batch_size == 0


def test_resolving_twice_changes_nothing() -> None:
    once = resolve_automatic(config(batch_size=3))

    assert resolve_automatic(once) == once


def test_given_values_stay() -> None:
    resolved = resolve_automatic(config(batch_size=5, max_prefill_tokens=77, max_new_tokens=9))

    assert resolved.scheduler.batch_size == 5
    assert resolved.scheduler.max_prefill_tokens == 77
    assert resolved.engine.max_model_len == 109


def test_without_chunked_prefill_a_step_holds_the_whole_batch() -> None:
    resolved = resolve_automatic(config(batch_size=3, enable_chunked_prefill=False))

    assert resolved.scheduler.max_prefill_tokens == 300


def test_a_large_batch_leaves_room_for_prompts() -> None:
    assert resolve_automatic(config(batch_size=4000)).scheduler.max_prefill_tokens == 8000
