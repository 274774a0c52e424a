"""The command line of the service that a load is put on."""

from dataclasses import replace

import pytest

from inferkit.bench.load.words import count_pairs, load_text, service_words
from inferkit.config.arguments import parse_arguments
from inferkit.config.schema import ClusterConfig, DisaggConfig, InferenceConfig, LoadConfig

LOAD = ["runner=load", "load.rate=4", "load.num_requests=8", "sweep.slo.ttft_s=1"]


def words(*typed: str, role: str = "cluster", **nodes: object) -> list[str]:
    config = replace(InferenceConfig(role=role), **nodes)
    return service_words(parse_arguments([f"+role={role}", *typed, *LOAD]), config)


def test_what_is_for_the_load_stays_here_and_all_else_is_passed_on():
    found = words("model=llama", "cluster.prefill=2", "hydra.run.dir=x", "hydra.sweep.dir=y")
    own = ["model=llama", "cluster.prefill=2"]
    assert found == ["+role=cluster", *own, "router.port=0", "hydra.mode=RUN"]


@pytest.mark.parametrize(
    ("role", "key"), [("serve", "disagg.http_port"), ("cluster", "router.port")]
)
def test_a_free_port_is_taken_unless_one_was_typed(role, key):
    assert f"{key}=0" in words(role=role)
    typed = words(f"{key}=8000", role=role)
    assert f"{key}=8000" in typed and f"{key}=0" not in typed


def test_a_port_that_an_experiment_has_chosen_stays():
    found = words("+experiment=x", role="serve", disagg=DisaggConfig(http_port=9000))
    assert not any(text.startswith("disagg.http_port") for text in found)


def test_a_file_of_conf_sweep_is_passed_on_without_being_a_sweep():
    found = words("+sweep=pd_ratio", "-m", "--config-dir", "/tmp")
    assert "+sweep=pd_ratio" in found and found[-1] == "hydra.mode=RUN"
    assert "--multirun" not in found and "-m" not in found
    assert "--config-dir" in found


def test_pairs_of_a_cluster_are_those_of_its_instances():
    config = InferenceConfig(role="cluster", cluster=ClusterConfig(prefill=2, decode=3))
    assert count_pairs(config) == 6
    assert count_pairs(replace(config, role="serve")) == 0


def test_a_load_is_told_in_words():
    assert load_text(LoadConfig()) == "64 requests of 128 + 64 tokens, 8 at a time"
    assert load_text(LoadConfig(rate=2.5)) == "64 requests of 128 + 64 tokens, 2.5 per second"
