"""Prefill and decode on hosts of their own: network namespaces around a switch."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.e2e.commands import command, end_started, finish, start, token_ids

pytestmark = pytest.mark.netns
NUM_HOSTS = 4
ADDRESSES = [f"10.78.0.{number}" for number in range(1, NUM_HOSTS + 1)]
SECRET = {"INFERKIT_TEST_SECRET": "of the test"}
COMMON = ("engine.warm_up=false", "disagg.secret_env=INFERKIT_TEST_SECRET")
INSTANCE = (
    f"disagg.prefill_ips=[{','.join(ADDRESSES[:2])}]",
    f"disagg.decode_ips=[{','.join(ADDRESSES[2:])}]",
    "disagg.transfer._target_=inferkit.kv_transfer.engines.tcp.TcpEngine",
    "disagg.heartbeat_interval_s=1",
    "disagg.lease_s=6",
)
PREFILL = (
    *INSTANCE,
    "+role=prefill",
    "parallel=tp2",
    "parallel.devices_per_node=1",
    "parallel.master_port=29500",
)
DECODE = (*INSTANCE, "+role=decode")
ROUTER_URL = f"http://{ADDRESSES[2]}:8000"
ROUTER = (
    "+role=router",
    f"router.host={ADDRESSES[2]}",
    f"router.prefill_urls=[http://{ADDRESSES[0]}:8001]",
    f"router.decode_urls=[http://{ADDRESSES[2]}:8100,http://{ADDRESSES[3]}:8100]",
    "router.retries=2",
)
POST = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=30) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Words that run a program on each host; skips where namespaces are not permitted."""
    prefix = f"pd{os.getpid()}"
    names = [f"{prefix}-{number}" for number in range(NUM_HOSTS)]
    switch = f"{prefix}-switch"
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0")
            ip("-n", switch, "link", "set", "eth0", "netns", name)
            ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [("ip", "netns", "exec", name) for name in names], switch
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    finally:
        end_started()
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ask(host, url, body=None):
    """(status, answer) as a client on that host gets it; status 0 = no answer."""
    words = [*host, sys.executable, "-S", "-c", POST, url, json.dumps(body) if body else ""]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def start_all(directory, model, hosts):
    runs = []
    for number, (host, words) in enumerate(
        [
            (hosts[0], PREFILL),
            (hosts[1], PREFILL),
            (hosts[2], DECODE),
            (hosts[3], DECODE),
            (hosts[2], ROUTER),
        ]
    ):
        folder = directory / f"process{number}"
        folder.mkdir()
        words = command(model, *COMMON, *words, "hydra.run.dir=run")
        runs.append(start(folder, words, before=host, **SECRET))
    return runs


def wait_until_whole(host, runs, num_decodes, limit_s=150):
    """Until the router has a prefill and so many decode instances."""
    deadline_s = time.monotonic() + limit_s
    while True:
        for run in runs:
            assert run.poll() is None, run.stdout.read()
        status, answer = ask(host, f"{ROUTER_URL}/stats")
        instances = answer["instances"] if status == 200 else []
        ready = [entry["role"] for entry in instances if entry["state"] == "ready"]
        is_ready = ask(host, f"{ROUTER_URL}/ready")[0] == 200
        if is_ready and sorted(ready) == ["decode"] * num_decodes + ["prefill"]:
            return
        assert time.monotonic() < deadline_s, answer
        time.sleep(0.3)


def generate(host, token_ids):
    body = {"prompt": token_ids, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return ask(host, f"{ROUTER_URL}/generate", body)


def test_instances_on_several_hosts(tmp_path, tiny_hf_model, hosts):
    """Prefill takes two hosts, each decode instance one; then a decode host is cut off."""
    words, switch = hosts
    model = tiny_hf_model("llama", eos_token_id=None)
    prompts = [[5 + number, 6, 7, 8, 9] * 4 for number in range(8)]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    offline = ("data.dataset=jsonl", f"data.dataset_path={tmp_path / 'prompts.jsonl'}")
    alone = start(
        tmp_path, command(model, *offline, "scheduler.max_new_tokens=6", "hydra.run.dir=alone")
    )
    output = finish(alone)
    assert alone.returncode == 0, output
    expected = token_ids(tmp_path / "alone")
    runs = start_all(tmp_path, model, words)
    wait_until_whole(words[2], runs, 2)
    for prompt, tokens in zip(prompts, expected, strict=True):
        status, answer = generate(words[2], prompt)
        assert (status, answer["output_ids"]) == (200, tokens), answer

    ip("-n", switch, "link", "set", "port3", "down")
    start_s = time.monotonic()
    for prompt, tokens in zip(prompts * 2, expected * 2, strict=True):
        status, answer = generate(words[2], prompt)
        assert (status, answer["output_ids"]) == (200, tokens), answer
    assert time.monotonic() - start_s < 60

    ip("-n", switch, "link", "set", "port3", "up")
    wait_until_whole(words[2], runs, 2)
    for prompt, tokens in zip(prompts, expected, strict=True):
        status, answer = generate(words[2], prompt)
        assert (status, answer["output_ids"]) == (200, tokens), answer
