"""A component is checked by its source: target, keys, `params`, custom parameters."""

from collections.abc import Callable

import pytest

from inferkit.config.check import Checker

SHAPE = [
    "model=llama",
    "model.with_ckpt=false",
    "+model.arch={hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:259}",
]
OWN = """
from inferkit.scheduler.scheduler import Scheduler

class Mine(Scheduler):
    def __init__(self, *, window: int, mode: str = "a", **kwargs):
        super().__init__(**kwargs)

class Bare:
    def __init__(self, *, batch_size): ...
"""


def texts(checker: Checker, *overrides: str) -> list[str]:
    return [str(f) for f in checker.check_overrides([*SHAPE, *overrides]).faults]


def test_a_component_of_the_users_own_with_its_params(
    checker: Checker, make_package: Callable[..., None]
) -> None:
    make_package("own_pkg", parts=OWN)

    assert (
        texts(
            checker,
            "allowed_targets=[own_pkg]",
            "scheduler._target_=own_pkg.parts.Mine",
            "+scheduler.params={window:4,mode:b}",
        )
        == []
    )


def test_params_that_a_constructor_does_not_take(
    checker: Checker, make_package: Callable[..., None]
) -> None:
    make_package("own_params_pkg", parts=OWN)

    assert texts(
        checker,
        "allowed_targets=[own_params_pkg]",
        "scheduler._target_=own_params_pkg.parts.Mine",
        "+scheduler.params={window:4,mod:b,clock:1,batch_size:2}",
        "+kv_cache.params.colour=red",
        "+runner.params.x=1",
    ) == [
        "kv_cache.params.colour=red: is no argument of "
        "inferkit.kv_cache.kv_cache_manager.KVCacheManager\nit takes no params",
        "scheduler.params.mod=b: is no argument of own_params_pkg.parts.Mine; did you mean mode?\n"
        "it takes mode, window",
        "scheduler.params.clock=1: is given by inferkit itself to scheduler",
        "scheduler.params.batch_size=2: is a key of the node itself; set scheduler.batch_size",
        "runner.params.x=1: is no argument of inferkit.offline.runner.OfflineRunner\n"
        "it takes no params",
    ]


def test_a_required_argument_that_nobody_gives(
    checker: Checker, make_package: Callable[..., None]
) -> None:
    make_package("required_pkg", parts=OWN)

    assert texts(
        checker,
        "allowed_targets=[required_pkg]",
        "scheduler._target_=required_pkg.parts.Mine",
    ) == [
        "scheduler._target_=required_pkg.parts.Mine: its constructor needs window; "
        "set +scheduler.params.window=..."
    ]


def test_a_constructor_that_does_not_take_the_nodes_keys(
    checker: Checker, make_package: Callable[..., None]
) -> None:
    make_package("bare_pkg", parts=OWN)

    (text,) = texts(checker, "allowed_targets=[bare_pkg]", "scheduler._target_=bare_pkg.parts.Bare")

    assert "its constructor does not take attn_dp_size, clock, enable_chunked_prefill" in text
    assert "batch_size," not in text


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "runner._target_=os.system",
            "runner._target_=os.system: is a part of Python, and no component of inferkit",
        ),
        (
            "kv_cache._target_=inferkit.kv_cache.kv_cache_manager.KVCacheManger",
            "kv_cache._target_=inferkit.kv_cache.kv_cache_manager.KVCacheManger: names nothing in "
            "inferkit.kv_cache.kv_cache_manager; did you mean "
            "inferkit.kv_cache.kv_cache_manager.KVCacheManager?",
        ),
        (
            "allowed_targets=['my-pkg']",
            "allowed_targets=[my-pkg]: 'my-pkg' is no dotted prefix such as mypackage or "
            "mypackage.loaders",
        ),
    ],
)
def test_targets(checker: Checker, override: str, problem: str) -> None:
    assert texts(checker, override) == [problem]


def test_the_loader_is_checked_where_weights_are_loaded(checker: Checker) -> None:
    loader = "model.loader._target_=inferkit.loader.default_loader.Nothing"

    assert texts(checker, loader) == []
    checked = checker.check_overrides(["model=llama", "model.path=gpt2", loader])
    assert [fault.key for fault in checked.faults] == ["model.loader._target_"]


def test_custom_params_must_be_declared_by_the_model(
    checker: Checker, make_package: Callable[..., None]
) -> None:
    make_package(
        "custom_pkg",
        model="""
        class MyModel:
            CUSTOM_PARAMS = ("chunk_len", "num_streams")
        """,
    )
    own = ["allowed_targets=[custom_pkg]", "model._target_=custom_pkg.model.MyModel"]

    assert texts(checker, *own, "+model.custom_params.chunk_len=4") == []
    assert texts(checker, *own, "+model.custom_params.chunk_length=4") == [
        "model.custom_params.chunk_length=4: is not read by custom_pkg.model.MyModel; "
        "did you mean chunk_len?\nit reads chunk_len, num_streams (declared in its CUSTOM_PARAMS)"
    ]
    assert texts(checker, "+model.custom_params.x=4") == [
        "model.custom_params.x=4: is not read by inferkit.models.dense.model.LlamaForCausalLM\n"
        "it reads none (declared in its CUSTOM_PARAMS)"
    ]
