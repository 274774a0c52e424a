"""Each rule: the value that breaks it, what is said, and the value beside it that is fine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.faults import Findings
from inferkit.config.rules import RANGES, check_rules, value_at
from inferkit.config.schema import (
    DataConfig,
    DatasetName,
    DecodeSchedulerConfig,
    DisaggConfig,
    DisaggMode,
    SweepConfig,
    TransferConfig,
)
from tests.config.configs import BASE, changed, faults, warnings


def test_defaults_break_no_rule() -> None:
    assert check_rules(BASE) == Findings()


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("data__input_truncated_len", 0, 1),
        ("data__limit", 0, 1),
        ("engine__max_model_len", 1, 33),
        ("kv_cache__block_size", 0, 1),
        ("kv_cache__mem_fraction", 0.0, 1.0),
        ("kv_cache__mem_fraction", 1.01, 0.01),
        ("kv_cache__num_blocks", 1, 2),
        ("scheduler__batch_size", -1, 1),
        ("scheduler__max_new_tokens", 0, 1),
        ("scheduler__max_prefill_tokens", -1, 33),
        ("platform__num_threads", -1, 1),
        ("platform__device_memory", -1, 1),
    ],
)
def test_ranges(name: str, bad: Any, good: Any) -> None:
    (fault,) = faults(**{name: bad})

    assert fault.startswith(f"{name.replace('__', '.')}={bad}: is out of range; allowed is ")
    assert faults(**{name: good}) == []


def test_the_value_that_a_range_suggests_is_allowed() -> None:
    for limits in RANGES:
        assert limits.holds(limits.use), limits.key
        base = replace(BASE, scheduler=DecodeSchedulerConfig(_target_="x"))
        value_at(base, limits.key)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", -0.5, "is out of range; allowed is >= 0.0"),
        ("top_p", 0.0, "keeps no token; allowed is 0 < top_p <= 1 (1 = all)"),
        ("top_p", 1.5, "is out of range; allowed is in [0.0, 1.0]"),
        ("top_k", -2, "is out of range; allowed is >= -1"),
        ("min_p", 2.0, "is out of range; allowed is in [0.0, 1.0]"),
        ("seed", -1, "is out of range; allowed is in [0, 9223372036854775807]"),
        ("seed", 2**63, "is out of range; allowed is in [0, 9223372036854775807]"),
    ],
)
def test_sampling_ranges_are_those_of_a_request(name: str, value: float, problem: str) -> None:
    assert faults(**{f"data__{name}": value}) == [f"data.{name}={value}: {problem}"]


def test_filters_are_named_when_greedy_sampling_ignores_them() -> None:
    values = {"data__top_p": 0.9, "data__top_k": 5, "data__min_p": 0.1}

    assert warnings(**values) == [
        "data.top_p=0.9: has no effect with data.temperature=0 (greedy)",
        "data.top_k=5: has no effect with data.temperature=0 (greedy)",
        "data.min_p=0.1: has no effect with data.temperature=0 (greedy)",
    ]
    assert warnings(**values, data__temperature=0.7) == []


def test_a_request_must_hold_a_prompt_and_its_output() -> None:
    assert faults(engine__max_model_len=32) == [
        "engine.max_model_len=32: leaves no room for a prompt beside "
        "scheduler.max_new_tokens=32; allowed is >= 33"
    ]
    assert faults(engine__max_model_len=33) == []


def test_fixed_steps_need_room_for_every_step() -> None:
    assert faults(engine__max_model_len=287, scheduler__fixed_steps=True) == [
        "engine.max_model_len=287: cannot hold data.input_truncated_len=256 and "
        "scheduler.max_new_tokens=32, which scheduler.fixed_steps always runs; allowed is >= 288"
    ]
    assert faults(engine__max_model_len=288, scheduler__fixed_steps=True) == []
    assert faults(engine__max_model_len=287) == []


def test_a_step_must_hold_more_than_the_decoding_requests() -> None:
    assert faults(scheduler__batch_size=8, scheduler__max_prefill_tokens=8) == [
        "scheduler.max_prefill_tokens=8: leaves no room for a prompt beside 8 decoding requests; "
        "allowed is > 8 or 0 (automatic)"
    ]
    assert faults(scheduler__batch_size=8, scheduler__max_prefill_tokens=9) == []
    assert faults(scheduler__batch_size=9000) == []


def test_without_chunked_prefill_a_small_step_refuses_prompts() -> None:
    small = {"scheduler__enable_chunked_prefill": False, "scheduler__max_prefill_tokens": 100}

    assert warnings(**small) == [
        "scheduler.max_prefill_tokens=100: without chunked prefill, longer prompts are refused; "
        "data.input_truncated_len=256 lets them through to it"
    ]
    assert warnings(**small, data__input_truncated_len=100) == []


@pytest.mark.parametrize("buckets", [[4, 2], [0, 1], [2, 2], [-1]])
def test_batch_buckets_rise(buckets: list[int]) -> None:
    (fault,) = faults(exe_mode__batch_buckets=buckets)

    assert fault.endswith("must be sizes >= 1 that rise, such as '[1,2,4,8]'")
    assert faults(exe_mode__batch_buckets=[1, 2, 8]) == []


def test_dataset_and_its_path(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"

    assert faults(data__dataset=DatasetName.jsonl) == [
        "data.dataset_path: has no value, which data.dataset=jsonl needs; set "
        "data.dataset_path=... (a .jsonl file, or a folder of them)"
    ]
    assert faults(data__dataset_path="x.jsonl") == [
        "data.dataset_path=x.jsonl: has no effect with data.dataset=default; name the format of "
        "the file: data.dataset=LongBench, data.dataset=InfiniteBench, data.dataset=jsonl"
    ]
    absent = {"data__dataset": DatasetName.LongBench, "data__dataset_path": str(file)}
    assert faults(**absent) == [f"data.dataset_path={file}: does not exist\nlooked in {Path.cwd()}"]
    folder = {"data__dataset": DatasetName.LongBench, "data__dataset_path": str(tmp_path)}
    assert faults(**folder) == [f"data.dataset_path={tmp_path}: is a folder without .jsonl files"]
    file.write_text('{"prompt": "hi"}\n')
    assert faults(**absent) == []
    assert faults(**folder) == []


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (
            {"disagg__mode": DisaggMode.prefill},
            "disagg.mode=prefill: is a part of a role; choose +role=prefill",
        ),
        (
            {"disagg__transfer": TransferConfig(num_threads=2)},
            "disagg.transfer.num_threads=2: has no effect without a role",
        ),
        (
            {"router__port": 9},
            "router.port=9: has no effect without a role",
        ),
        (
            {"cluster__prefill": 2},
            "cluster.prefill=2: has no effect without a role; choose +role=cluster",
        ),
        (
            {"kv_cache__host_bytes": 5},
            "kv_cache.host_bytes=5: has no effect without a role: only a decode role keeps "
            "retracted requests in host memory",
        ),
        (
            {"platform__version": "A2"},
            "platform.version=A2: has no effect on a CPU: it names the generation of an Ascend "
            "device",
        ),
        (
            {"exe_mode__enable_cache_compile": True},
            "exe_mode.enable_cache_compile=true: has no effect in eager mode, which compiles no "
            "graph",
        ),
        (
            {"exe_mode__enable_dynamic_graph": False},
            "exe_mode.enable_dynamic_graph=false: has no effect in eager mode, which compiles no "
            "graph",
        ),
        (
            {"model__next_n": 2},
            "model.next_n=2: needs a model with a draft head; no model of this version has one",
        ),
        (
            {"model__mtp_target": "a.B"},
            "model.mtp_target=a.B: needs a model with a draft head; no model of this version "
            "has one",
        ),
    ],
)
def test_options_without_effect_are_refused(values: dict[str, Any], fault: str) -> None:
    assert faults(**values) == [fault]


def test_graph_options_are_for_graph_modes() -> None:
    assert faults(exe_mode__name="graph", exe_mode__enable_static_kernel=True) == []


def test_loader_params_without_a_checkpoint_are_named() -> None:
    loader = replace(BASE.model.loader, params={"threads": 2})

    assert warnings(model__with_ckpt=False, model__loader=loader) == [
        "model.loader.params={threads:2}: has no effect with random weights (model.with_ckpt=false)"
    ]


def test_all_faults_come_at_once() -> None:
    cfg = changed(data__top_p=3.0, kv_cache__block_size=0, router__port=1, scheduler__batch_size=-3)

    assert [fault.key for fault in check_rules(cfg).faults] == [
        "kv_cache.block_size",
        "scheduler.batch_size",
        "data.top_p",
        "router.port",
    ]


def test_schema_defaults_of_nodes_without_use_are_no_fault() -> None:
    cfg = replace(BASE, disagg=DisaggConfig(), sweep=SweepConfig(), data=DataConfig())

    assert check_rules(cfg).faults == []
