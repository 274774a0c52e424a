"""The runner in this process, where it is a rank itself; tests/e2e has it in real processes."""

import json
from pathlib import Path

import pytest

from inferkit import load_config
from inferkit.config.schema import DatasetName
from inferkit.core.errors import RequestError, WorkerError
from inferkit.core.place import RankPlace
from inferkit.offline.runner import OfflineRunner
from inferkit.offline.worker import run_offline


@pytest.fixture
def config(tiny_hf_model):
    overrides = ["model=llama", "model.dtype=float32", "data.limit=2", "scheduler.max_new_tokens=3"]
    return load_config([*overrides, f"model.path={tiny_hf_model('llama', eos_token_id=None)}"])


def test_a_rank_without_a_parent_prints_the_summary_itself(config, tmp_path, capsys):
    metrics = OfflineRunner().run_rank(config, place=RankPlace(), run_dir=tmp_path)
    assert metrics["num_requests"] == 2
    assert f"run directory: {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics


def test_the_error_of_a_rank_without_a_parent_is_its_message(config, tmp_path, capsys):
    config.model.path = str(tmp_path / "absent")
    with pytest.raises(WorkerError, match="absent") as caught:
        OfflineRunner().run_rank(config, place=RankPlace(), run_dir=tmp_path)
    assert "Traceback" not in str(caught.value)


def test_a_run_that_could_run_no_request_fails(config, tmp_path, capsys):
    config.engine.max_model_len = 4
    with pytest.raises(RequestError) as caught:
        OfflineRunner().run_rank(config, place=RankPlace(), run_dir=tmp_path)
    assert str(caught.value).startswith(
        "nothing was generated, for all requests (2) were refused; the first: the prompt has "
    )
    assert "engine.max_model_len=4 allows 3" in str(caught.value)
    assert "None" not in capsys.readouterr().out
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["finish_reasons"] == {"prompt_too_long": 2}


def test_refused_requests_among_others_are_counted(config, tmp_path, capsys):
    prompts = [{"prompt": [5, 6]}, {"prompt": [5] * 50}, {"prompt": [7, 8]}]
    config.data.dataset_path = str(tmp_path / "prompts.jsonl")
    Path(config.data.dataset_path).write_text("\n".join(map(json.dumps, prompts)))
    config.data.dataset, config.data.limit = DatasetName.jsonl, None
    config.engine.max_model_len = 16
    metrics = OfflineRunner().run_rank(config, place=RankPlace(), run_dir=tmp_path)
    assert metrics["finish_reasons"] == {"length": 2, "prompt_too_long": 1}
    assert "warning: 1 of 3 requests were refused" in capsys.readouterr().out


def test_a_rank_reports_stages_steps_and_the_result_in_order(config, tmp_path):
    class Channel:
        def __init__(self):
            self.events = []

        def send(self, event):
            self.events.append(event)

    channel = Channel()
    run_offline(config, tmp_path, place=RankPlace(), channel=channel)
    kinds = [event["event"] for event in channel.events if event["event"] != "load"]
    num_steps = kinds.count("step")
    assert kinds == ["stage"] * (len(kinds) - num_steps - 1) + ["step"] * num_steps + ["result"]
    assert num_steps == 3
    (generating,) = [event for event in channel.events if event.get("num_prompts")]
    assert generating["num_prompts"] == 2
    assert len(channel.events[-1]["results"]) == 2
