"""What the runner of a cluster starts; the processes themselves are in tests/e2e."""

import http.server
import socket
import sys
import threading
from dataclasses import replace

import pytest

from inferkit.config.check_cluster import ClusterPlan
from inferkit.config.provenance import record
from inferkit.core.errors import ConfigError
from inferkit.core.listening import reserved
from inferkit.online.cluster.runner import (
    ROUTER_KEYS,
    ClusterRunner,
    child_specs,
    is_ready,
    typed_arguments,
    url_of,
)
from tests.config.configs import in_role

URL = "http://127.0.0.1:8000"


def specs_of(tmp_path, *, target="inferkit.platforms.cpu.CpuPlatform", **cluster):
    config = in_role("cluster", **{f"cluster__{name}": value for name, value in cluster.items()})
    instance = in_role("prefill", platform___target_=target, parallel__world_size=2)
    configs = {"router": in_role("router"), "prefill": instance, "decode": instance}
    words = {role: [f"+role={role}"] for role in configs}
    plan = ClusterPlan(words=words, configs=configs, faults=[], warnings=[])
    return child_specs(plan, config, ["--config-dir", "d"], url=URL, port=8000, run_dir=tmp_path)


def test_the_router_is_drained_before_the_instances(tmp_path):
    specs = specs_of(tmp_path, prefill=2, decode=1)
    assert [(spec.name, spec.stage) for spec in specs] == [
        ("router", 0),
        ("prefill0", 1),
        ("prefill1", 1),
        ("decode0", 1),
    ]
    assert [spec.log for spec in specs] == [tmp_path / f"{spec.name}.log" for spec in specs]


def test_commands_are_those_that_a_user_would_type(tmp_path):
    router, prefill, _ = specs_of(tmp_path)
    start = [sys.executable, "-m", "inferkit", "--config-dir", "d"]
    assert list(router.command(1)) == [
        *start,
        "+role=router",
        "router.port=8000",
        f"hydra.run.dir='{tmp_path}/router'",
        "hydra.mode=RUN",
    ]
    assert list(prefill.command(1)) == [
        *start,
        f"disagg.router_url={URL}",
        "+role=prefill",
        f"hydra.run.dir='{tmp_path}/prefill0'",
        "hydra.mode=RUN",
    ]


def test_every_life_has_a_folder_of_its_own(tmp_path):
    folder = tmp_path / "it's one"
    router = specs_of(folder)[0]
    assert router.command(3)[-2] == f"hydra.run.dir='{tmp_path}/it\\'s one/router.3'"


def test_instances_on_devices_have_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    specs = specs_of(tmp_path, target="inferkit.platforms.cuda.CudaPlatform", prefill=2)
    assert [dict(spec.variables) for spec in specs] == [
        {},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
        {"CUDA_VISIBLE_DEVICES": "4,5"},
    ]


@pytest.mark.parametrize("program", ["python -m inferkit", "inferkit"])
def test_the_command_line_is_read_from_the_run_directory(tmp_path, program):
    command = f"{program} +role=cluster 'cluster.prefill_overrides=\"a=1 b=2\"' parallel=tp2"
    record(tmp_path, command=command)
    assert typed_arguments(tmp_path).overrides == (
        "+role=cluster",
        'cluster.prefill_overrides="a=1 b=2"',
        "parallel=tp2",
    )


def test_a_run_without_a_command_line_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="provenance.json is missing.*python -m inferkit"):
        ClusterRunner().run(in_role("cluster"), run_dir=tmp_path)


def test_roles_that_do_not_fit_are_refused_before_anything_starts(tmp_path):
    own = "cluster.decode_overrides='kv_cache.block_size=16'"
    record(tmp_path, command=f'python -m inferkit +role=cluster "{own}"')
    config = in_role("cluster")
    cluster = replace(config.cluster, decode_overrides="kv_cache.block_size=16")
    with pytest.raises(ConfigError, match="kv_cache.block_size: prefill 128, decode 16"):
        ClusterRunner().run(replace(config, cluster=cluster), run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["provenance.json"]


def test_the_router_can_listen_where_its_port_is_reserved():
    with reserved("127.0.0.1", 0) as port, socket.socket() as router:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        router.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        router.bind(("127.0.0.1", port))
        router.listen()
        with pytest.raises(ConfigError, match=f"router.port={port} cannot be used on router.host"):
            reserved("127.0.0.1", port, keys=ROUTER_KEYS).__enter__()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("10.0.0.1", "http://10.0.0.1:80"),
    ],
)
def test_instances_reach_the_router_on_this_host(host, url):
    assert url_of(host, 80) == url


class Answers(http.server.BaseHTTPRequestHandler):
    codes = iter([503, 200])

    def do_GET(self):
        assert self.path == "/ready"
        self.send_response(next(self.codes))
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_router_is_ready_once_it_says_so():
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert [is_ready(url), is_ready(url)] == [False, True]
        finally:
            server.shutdown()
            thread.join()
    assert not is_ready(url)
