"""Rules between a configuration and the shape of its model."""

from dataclasses import dataclass
from typing import Any

import pytest

from inferkit.config.faults import Findings
from inferkit.config.model_rules import check_model, require_model
from inferkit.config.resolve import resolve_automatic
from inferkit.core.errors import ConfigError
from tests.config.configs import changed


@dataclass(frozen=True, kw_only=True)
class Arch:
    architecture: str = "AnyForCausalLM"
    max_context_len: int = 2048
    num_experts: int = 0
    trained_len: int = 4096

    def keys_depend_on_prompt_len(self, max_model_len: int) -> bool:
        return max_model_len > self.trained_len


def found(arch: Arch, **values: Any) -> list[str]:
    findings = Findings()
    check_model(resolve_automatic(changed(**values)), arch, findings)
    return [str(fault) for fault in findings.faults]


def test_a_request_fits_the_positions() -> None:
    assert found(Arch(max_context_len=288)) == []
    assert found(Arch(max_context_len=287)) == [
        "engine.max_model_len=288: the model knows 287 positions; allowed is <= 287 (it is "
        "data.input_truncated_len=256 + scheduler.max_new_tokens=32; lower one of them)"
    ]


def test_no_prefix_cache_where_keys_depend_on_the_whole_prompt() -> None:
    arch = Arch(trained_len=200)

    assert found(arch) == []
    assert found(arch, kv_cache__enable_prefix_cache=True, engine__max_model_len=200) == []
    assert found(arch, kv_cache__enable_prefix_cache=True) == [
        "kv_cache.enable_prefix_cache=true: cannot be used up to engine.max_model_len=288: with "
        "this model's rope scaling the keys of a prefix depend on the length of the whole prompt"
    ]


@pytest.mark.parametrize("moe_tp_size", [2, 4, 8])
def test_experts_that_divide(moe_tp_size: int) -> None:
    sizes = {"parallel__world_size": 8, "parallel__moe_tp_size": moe_tp_size}

    assert found(Arch(num_experts=60), **sizes) == []


def test_experts_that_do_not_divide() -> None:
    assert found(Arch(num_experts=60), parallel__world_size=8) == [
        "parallel.moe_tp_size=1: spreads the model's num_experts=60 (model.arch or its "
        "config.json) over moe_ep_size=8 ranks (world_size=8 / moe_tp_size), which does not "
        "divide it; allowed is 2, 4, 8"
    ]


def test_an_allowed_size_nests_with_the_attention() -> None:
    # 2 and 3 would divide the experts too, but 3 does not nest with 2.
    sizes = {"parallel__world_size": 6, "parallel__attn_tp_size": 2}

    (fault,) = found(Arch(num_experts=3), **sizes)

    assert fault.endswith("allowed is 2, 6")


def test_a_dense_model_has_nothing_to_divide() -> None:
    assert found(Arch(), parallel__world_size=8) == []


def test_a_balanced_router_is_for_experts() -> None:
    assert found(Arch(num_experts=8), model__force_eplb=True) == []
    assert found(Arch(), model__force_eplb=True) == [
        "model.force_eplb=true: needs a mixture-of-experts model, and AnyForCausalLM has no experts"
    ]


def test_a_family_may_say_less() -> None:
    class Bare:
        max_context_len = 2048

    findings = Findings()
    config = changed(model__force_eplb=True, kv_cache__enable_prefix_cache=True)
    check_model(resolve_automatic(config), Bare(), findings)

    assert [fault.key for fault in findings.faults] == ["model.force_eplb"]


def test_a_worker_is_told_every_fault() -> None:
    config = resolve_automatic(changed(model__force_eplb=True))

    require_model(config, Arch(num_experts=4))
    with pytest.raises(ConfigError, match=r"engine.max_model_len=288: .*\nmodel.force_eplb=true"):
        require_model(config, Arch(max_context_len=100))
