import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferkit.config.build import RUNTIME_KEYWORDS, build, get_target, runtime_keywords
from inferkit.config.schema import SchedulerConfig, TargetConfig
from inferkit.core.errors import ComponentError, ConfigError
from inferkit.core.secrets import SecretText

PARTS = """
class Part:
    def __init__(self, *, clock=None, **kwargs):
        self.clock = clock
        self.kwargs = kwargs

class Strict:
    def __init__(self, *, size): ...

class Broken:
    def __init__(self, **kwargs):
        raise RuntimeError("the part's own failure")
"""


@dataclass(kw_only=True)
class PartConfig(TargetConfig):
    size: int = 3


def test_fields_params_and_runtime_arrive_as_keywords(make_package: Callable[..., None]) -> None:
    make_package("built_pkg", parts=PARTS)
    node = PartConfig(
        _target_="built_pkg.parts.Part", params={"window": [1, 2], "nested": {"a": 1}}
    )

    part = build(node, allowed_targets=["built_pkg"], key="part", clock="a clock")

    assert part.clock == "a clock"
    assert part.kwargs == {"size": 3, "window": [1, 2], "nested": {"a": 1}}
    assert type(part.kwargs["window"]) is list


def test_a_target_outside_the_allow_list_is_refused_before_import(
    make_package: Callable[..., None],
) -> None:
    make_package("outside_pkg", parts="raise SystemExit('imported')")
    node = TargetConfig(_target_="outside_pkg.parts.Part")

    with pytest.raises(
        ConfigError,
        match=r"^part\._target_=outside_pkg\.parts\.Part lies outside what may be built: inferkit; "
        r"allow it with 'allowed_targets=\[outside_pkg\]'$",
    ):
        build(node, allowed_targets=[], key="part")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("missing_pkg.parts.Prat", r"missing_pkg\.parts has no Prat"),
        ("missing_pkg.prats.Part", "cannot be found: No module named 'missing_pkg.prats'"),
    ],
)
def test_a_target_that_does_not_exist(
    make_package: Callable[..., None], target: str, problem: str
) -> None:
    make_package("missing_pkg", parts=PARTS)

    with pytest.raises(ConfigError, match=problem):
        get_target(target, allowed_targets=["missing_pkg"], key="part._target_")


def test_keywords_that_do_not_fit_are_named(make_package: Callable[..., None]) -> None:
    make_package("strict_pkg", parts=PARTS)
    node = PartConfig(_target_="strict_pkg.parts.Strict", params={"windw": 1})

    with pytest.raises(ConfigError, match="unexpected keyword argument 'windw'.*size, windw"):
        build(node, allowed_targets=["strict_pkg"], key="part")


@pytest.mark.parametrize("name", ["size", "clock"])
def test_params_may_not_set_what_is_given_otherwise(
    make_package: Callable[..., None], name: str
) -> None:
    make_package("taken_pkg", parts=PARTS)
    node = PartConfig(_target_="taken_pkg.parts.Part", params={name: 1})

    with pytest.raises(ConfigError, match=f"part.params sets {name}"):
        build(node, allowed_targets=["taken_pkg"], key="part", clock=None)


def test_a_failing_constructor_is_told_with_key_and_place(
    make_package: Callable[..., None],
) -> None:
    make_package("failing_pkg", parts=PARTS)
    node = TargetConfig(_target_="failing_pkg.parts.Broken")

    with pytest.raises(ComponentError) as caught:
        build(node, allowed_targets=["failing_pkg"], key="part")

    first, second = str(caught.value).splitlines()
    assert first == (
        "part._target_=failing_pkg.parts.Broken failed while it was built: "
        "RuntimeError: the part's own failure"
    )
    line = PARTS.splitlines().index('        raise RuntimeError("the part\'s own failure")') + 1
    assert second.endswith(f"failing_pkg/parts.py:{line} in __init__")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_module_that_fails_to_import_is_told_with_key_and_place(
    make_package: Callable[..., None],
) -> None:
    make_package("import_pkg", parts="import a_package_that_is_not_there")

    with pytest.raises(ComponentError) as caught:
        get_target("import_pkg.parts.Part", allowed_targets=["import_pkg"], key="part._target_")

    first, second = str(caught.value).splitlines()
    assert first == (
        "part._target_=import_pkg.parts.Part failed while it was imported: "
        "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
    )
    assert second.endswith("import_pkg/parts.py:1")


def test_an_error_of_inferkit_s_own_for_users_stays_what_it_is(
    make_package: Callable[..., None],
) -> None:
    parts = """
    from inferkit.config.build import get_target
    class Part:
        def __init__(self, *, own=False):
            get_target("inferkit.nowhere.Part", allowed_targets=[], key="inner")
    class Own:
        def __init__(self):
            from inferkit.core.errors import ConfigError
            raise ConfigError("window=0 is out of range")
    """
    make_package("own_errors_pkg", parts=parts)
    allowed = ["own_errors_pkg"]

    with pytest.raises(ConfigError, match=r"^inner=inferkit\.nowhere\.Part cannot be found"):
        build(TargetConfig(_target_="own_errors_pkg.parts.Part"), allowed_targets=allowed, key="p")
    with pytest.raises(ComponentError, match=r"ConfigError: window=0.*\n  at .*parts.py:9"):
        build(TargetConfig(_target_="own_errors_pkg.parts.Own"), allowed_targets=allowed, key="p")


def test_a_component_gets_its_secrets_as_plain_texts(make_package: Callable[..., None]) -> None:
    make_package("secret_pkg", parts=PARTS)
    secret = SecretText("hush", "${oc.env:API_KEY}")
    node = TargetConfig(_target_="secret_pkg.parts.Part", params={"keys": [secret], "key": secret})

    part = build(node, allowed_targets=["secret_pkg"], key="part")

    assert part.kwargs == {"keys": ["hush"], "key": "hush"}
    assert type(part.kwargs["key"]) is str and type(part.kwargs["keys"][0]) is str


def test_own_components_are_built() -> None:
    with pytest.raises(ConfigError, match="missing a required argument: 'kv_cache'"):
        build(
            SchedulerConfig(_target_="inferkit.scheduler.scheduler.Scheduler"),
            allowed_targets=[],
            key="scheduler",
        )


def test_runtime_keywords_are_those_of_the_wiring_page() -> None:
    given = build_calls("inferkit.runtime.assembly")
    assert {key: set(names) for key, names in RUNTIME_KEYWORDS.items()} == {
        key: names for key, names in given.items() if names
    }


def test_keywords_of_a_transfer_engine_are_those_of_the_hand_off() -> None:
    given = build_calls("inferkit.runtime.hand_off")["disagg.transfer"]
    for role in ("prefill", "decode"):
        assert runtime_keywords("disagg.transfer", role) == given
    assert runtime_keywords("disagg.transfer", None) == frozenset()


def test_a_role_s_scheduler_gets_more() -> None:
    alone = runtime_keywords("scheduler", None)
    assert runtime_keywords("scheduler", "prefill") - alone == {"transfer"}
    assert runtime_keywords("scheduler", "decode") - alone == {"transfer", "host_store"}
    assert runtime_keywords("scheduler", "serve") == alone == RUNTIME_KEYWORDS["scheduler"]


def build_calls(module: str) -> dict[str, set[str]]:
    """Node -> runtime keywords, of every call of `build` in a module's source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    given = {}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "build":
            keywords = {k.arg: k.value for k in node.keywords}
            key = ast.literal_eval(keywords["key"])
            given[key] = {name for name in keywords if name} - {"allowed_targets", "key"}
    return given
