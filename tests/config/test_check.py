"""Faults of all stages come together; consequences of a fault are not told as faults."""

from inferkit.config.check import Checker, add_new
from inferkit.config.faults import Fault

SHAPE = (
    "+model.arch={hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:259}"
)


def keys(checker: Checker, *overrides: str) -> list[str]:
    return [fault.key for fault in checker.check_overrides(overrides).faults]


def test_the_default_configuration_can_run(checker: Checker) -> None:
    checked = checker.check_overrides([])

    assert checked.faults == ()
    assert checked.warnings == ()
    assert checked.config is not None
    assert checked.config.scheduler.batch_size == 32


def test_faults_of_every_stage_come_at_once(checker: Checker) -> None:
    assert keys(
        checker,
        "scheduler.bath_size=3",
        "model=llama",
        "model.name=${nope}",
        "data.top_p=3",
        "runner._target_=os.system",
        "+engine.params.x=1",
    ) == [
        "scheduler.bath_size",
        "model.name",
        "data.top_p",
        "engine.params.x",
        "runner._target_",
        "model.path",
    ]


def test_a_wrong_option_hides_what_it_would_have_set(checker: Checker) -> None:
    assert keys(checker, "model=lama", "model.path=/no/such/folder") == ["model"]
    assert keys(checker, "exe_mode=egaer", "exe_mode.enable_static_kernel=true") == ["exe_mode"]


def test_a_value_of_the_wrong_type_is_told_once(checker: Checker) -> None:
    assert keys(checker, "kv_cache.block_size=x", "kv_cache.num_blocks=1") == [
        "kv_cache.block_size",
        "kv_cache.num_blocks",
    ]


def test_a_group_that_was_taken_away(checker: Checker) -> None:
    assert keys(checker, "~runner") == ["runner"]


def test_add_new_drops_consequences() -> None:
    faults = [Fault(key="model", problem="x"), Fault(key="data.seed", problem="x")]

    add_new(
        faults,
        [
            Fault(key="model.path", problem="below a fault"),
            Fault(key="data.seed", problem="known"),
            Fault(key="engine.a", problem="related", related=("data.seed",)),
            Fault(key="engine.b", problem="kept", related=("data.limit",)),
            Fault(key="engine.c", problem="related to one of its stage", related=("engine.b",)),
            Fault(key="models", problem="kept"),
        ],
    )

    assert [fault.key for fault in faults[2:]] == ["engine.b", "models"]


def test_all_values_can_be_changed_together(checker: Checker) -> None:
    checked = checker.check_overrides(
        [
            "model=qwen2",
            "model.with_ckpt=false",
            SHAPE,
            "model.dtype=float32",
            "data.temperature=0.7",
            "data.top_p=0.9",
            "data.seed=1",
            "kv_cache.enable_prefix_cache=true",
            "kv_cache.block_size=1",
            "scheduler.fixed_steps=true",
            "exe_mode.batch_buckets=[1,2,4]",
            "platform.num_threads=1",
        ]
    )

    assert checked.faults == ()
    assert checked.warnings == ()
    assert checked.config is not None
    assert type(checked.config.exe_mode.batch_buckets) is list
    assert type(checked.config.model.arch) is dict
