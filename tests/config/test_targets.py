"""Classes as their source declares them; nothing is imported."""

import inspect
import sys
from collections.abc import Callable

import pytest

from inferkit.config.targets import Keywords, SourceIndex, TargetError, is_allowed


def keywords_of(target: str) -> Keywords:
    index = SourceIndex()
    return index.keywords(index.find(target))


@pytest.mark.parametrize(
    ("target", "allowed", "expected"),
    [
        ("inferkit.scheduler.scheduler.Scheduler", [], True),
        ("inferkitty.Scheduler", [], False),
        ("mypkg.Scheduler", [], False),
        ("mypkg.Scheduler", ["mypkg"], True),
        ("mypkg.Scheduler", ["mypkg."], True),
        ("mypkg2.Scheduler", ["mypkg"], False),
        ("mypkg.Scheduler", [""], False),
        ("mypkg.a.B", ["mypkg.a"], True),
    ],
)
def test_is_allowed(target: str, allowed: list[str], expected: bool) -> None:
    assert is_allowed(target, allowed) is expected


def test_keywords_of_a_plain_constructor(make_package: Callable[..., None]) -> None:
    make_package(
        "plain_pkg",
        parts="""
        class Part:
            def __init__(self, first, second=2, *, third, fourth=None): ...
        """,
    )

    assert keywords_of("plain_pkg.parts.Part") == Keywords(
        names=frozenset({"first", "second", "third", "fourth"}),
        takes_any=False,
        required=frozenset({"first", "third"}),
    )
    assert "plain_pkg" not in sys.modules


def test_kwargs_that_go_on_to_the_base_add_its_names(make_package: Callable[..., None]) -> None:
    make_package(
        "base_pkg",
        parts="""
        from inferkit.scheduler.scheduler import Scheduler

        class Mine(Scheduler):
            def __init__(self, *, window: int, **kwargs):
                super().__init__(**kwargs)

        class Swallows(Scheduler):
            def __init__(self, *, window: int, **kwargs):
                self.kwargs = kwargs

        class Inherits(Scheduler):
            pass
        """,
    )

    mine = keywords_of("base_pkg.parts.Mine")
    assert {"window", "batch_size", "clock"} <= mine.names
    assert not mine.takes_any
    assert mine.required == {"window"}
    assert keywords_of("base_pkg.parts.Swallows").takes_any
    own = keywords_of("inferkit.scheduler.scheduler.Scheduler")
    assert keywords_of("base_pkg.parts.Inherits") == own


def test_dataclasses_and_functions(make_package: Callable[..., None]) -> None:
    make_package(
        "data_pkg",
        parts="""
        import dataclasses
        from dataclasses import dataclass

        @dataclass
        class Base:
            size: int

        @dataclasses.dataclass(kw_only=True)
        class Part(Base):
            rate: float = 0.5

        def make(size, rate=1.0): ...
        """,
    )

    for target in ("data_pkg.parts.Part", "data_pkg.parts.make"):
        assert keywords_of(target) == Keywords(
            names=frozenset({"size", "rate"}), takes_any=False, required=frozenset({"size"})
        )


def test_re_exports_are_followed(make_package: Callable[..., None]) -> None:
    make_package(
        "export_pkg",
        __init__="from .parts import Part as Component",
        parts="""
        try:
            import fast_part
        except ImportError:
            class Part:
                def __init__(self, *, size): ...
        """,
    )

    assert keywords_of("export_pkg.Component").names == {"size"}


def test_what_cannot_be_read_takes_anything(make_package: Callable[..., None]) -> None:
    make_package(
        "dynamic_pkg",
        made='Part = type("Part", (), {})',
        based="""
        from unknown_package import Base

        class Part(Base):
            pass
        """,
        starred="from unknown_package import *",
    )

    assert keywords_of("dynamic_pkg.starred.Part").takes_any
    assert keywords_of("dynamic_pkg.made.Part").takes_any
    assert keywords_of("dynamic_pkg.based.Part").takes_any
    assert keywords_of("math.sqrt").takes_any


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (
            "inferkit.scheduler.scheduler.Schedulr",
            "names nothing in inferkit.scheduler.scheduler; "
            r"did you mean inferkit.scheduler.scheduler.Scheduler\?",
        ),
        (
            "inferkit.schedular.scheduler.Scheduler",
            r"there is no schedular in inferkit; did you mean inferkit.scheduler\?",
        ),
        ("not_installed_here.Part", "there is no module not_installed_here here"),
        ("Scheduler", "is no dotted name of a class"),
        ("inferkit.scheduler.", "is no dotted name of a class"),
        ("inferkit..Scheduler", "is no dotted name of a class"),
    ],
)
def test_targets_that_do_not_exist(target: str, problem: str) -> None:
    with pytest.raises(TargetError, match=problem):
        SourceIndex().find(target)


def test_a_syntax_error_names_file_and_line(make_package: Callable[..., None]) -> None:
    make_package("broken_pkg", parts="x = 1\nclass Part(\n")

    with pytest.raises(TargetError, match=r"parts\.py, line 2"):
        SourceIndex().find("broken_pkg.parts.Part")


def test_attribute_is_inherited(make_package: Callable[..., None]) -> None:
    make_package(
        "attribute_pkg",
        parts="""
        class Base:
            CUSTOM_PARAMS: tuple[str, ...] = ("a", "b")

        class Part(Base):
            pass

        class Other(Base):
            CUSTOM_PARAMS = ()
        """,
    )
    index = SourceIndex()

    assert index.attribute(index.find("attribute_pkg.parts.Part"), "CUSTOM_PARAMS") == ("a", "b")
    assert index.attribute(index.find("attribute_pkg.parts.Other"), "CUSTOM_PARAMS") == ()
    assert index.attribute(index.find("attribute_pkg.parts.Part"), "OTHER") is None


@pytest.mark.parametrize(
    "target",
    [
        "inferkit.scheduler.scheduler.Scheduler",
        "inferkit.platforms.cpu.CpuPlatform",
        "inferkit.kv_cache.kv_cache_manager.KVCacheManager",
        "inferkit.engine.execution_engine.ExecutionEngine",
        "inferkit.engine.exe_mode.Eager",
    ],
)
def test_source_and_inspection_agree(target: str) -> None:
    import importlib

    module, _, name = target.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters

    found = keywords_of(target)

    assert found.names == set(parameters)
    assert found.required == {n for n, p in parameters.items() if p.default is p.empty}
