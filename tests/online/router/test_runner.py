"""The process of a router: it tells where it is, serves, and drains when it is told to stop."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from inferkit.config.compose import load_config
from inferkit.core.errors import ConfigError
from inferkit.online.facts import Side
from inferkit.online.router.runner import RouterRunner
from tests.online.router.instances import FakeInstance, echo, instances, until
from tests.online.serving import run

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60
PROGRAM = """
import sys
from pathlib import Path
from tests.online.router.test_runner import config_of
from inferkit.online.router.runner import RouterRunner

config = config_of(prefill_urls=[sys.argv[2]], decode_urls=[sys.argv[3]])
RouterRunner(drain_limit_s=float(sys.argv[4])).run(config, run_dir=Path(sys.argv[1]))
"""


def config_of(**changes):
    """Of a router for a random byte model; composed without the role's file."""
    arch = (
        "{hidden_size:64,num_hidden_layers:1,num_attention_heads:4,num_key_value_heads:2,"
        "intermediate_size:64,vocab_size:300,max_position_embeddings:512}"
    )
    words = ["model=llama", "model.path=null", "model.with_ckpt=false", f"+model.arch={arch}"]
    config = load_config(words)
    router = replace(config.router, port=0, **changes)
    return replace(config, role="router", router=router)


@contextlib.asynccontextmanager
async def started(tmp_path, p, d, *, drain_limit_s=30.0):
    """A router's process, its address once it is ready, and what it has said."""
    words = [str(tmp_path), p.url, d.url, str(drain_limit_s)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, *words),
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
        stderr=asyncio.subprocess.PIPE,
    )
    said = []
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (said and "ready at" in said[-1]):
                line = (await process.stderr.readline()).decode()
                assert line, f"the router has ended: {''.join(said)}"
                said.append(line)
        url = re.search(r"ready at (http://\S+)", said[-1])[1]
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, verify=False) as client:
            yield process, client, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def slow_when_long(instance, leg):
    """100 tokens take for ever, fewer a while."""
    async for entry in echo(instance, leg):
        yield entry
        await asyncio.sleep(1.0 if leg.message.sampling.max_tokens == 100 else 0.02)


def test_a_router_serves_lets_requests_end_and_gives_up_at_the_second_signal(tmp_path):
    async def check():
        async with instances(1, 1) as (p, d), started(tmp_path, p, d) as (process, client, said):
            assert "router for llama at http://127.0.0.1:" in said[0]
            provenance = json.loads((tmp_path / "provenance.json").read_text())
            assert provenance["url"] == str(client.base_url).rstrip("/")

            def post(max_tokens):
                body = {"prompt": "ab", "max_tokens": max_tokens}
                return asyncio.create_task(client.post("/generate", json=body))

            assert (await post(4)).json()["output"] == "abab"
            d.script = slow_when_long
            short, long = post(50), post(100)
            await until(lambda: len(d.requests()) == 3)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT_S):
                while (await client.get("/ready")).json()["status"] != "draining":
                    await asyncio.sleep(0.01)
            assert (await post(4)).status_code == 503
            assert len((await short).json()["output_ids"]) == 50
            assert process.returncode is None and not long.done()
            begin_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            response = await long
            assert response.status_code == 503 and "shutting down" in response.text
            assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
            assert time.monotonic() - begin_s < 20
            await until(lambda: all(leg.is_closed or leg.is_over for leg in d.requests()))
            rest = (await process.stderr.read()).decode()
            assert "takes no new request" in rest and "Traceback" not in rest

    run(check())


def test_a_router_that_cannot_start_names_the_key(tmp_path):
    taken = FakeInstance(Side.PREFILL)

    async def check():
        async with taken:
            config = config_of(prefill_urls=[], decode_urls=[])
            router = replace(config.router, port=taken.port)
            with pytest.raises(ConfigError, match=f"router.port={taken.port} cannot be used on"):
                RouterRunner().run(replace(config, router=router), run_dir=tmp_path)

    run(check())
