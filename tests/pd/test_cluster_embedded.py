"""The embedded model through a cluster, with its defaults: the tokens of an offline run."""

import pytest

from inferkit import OfflineInference, SamplingParams, load_config
from tests.pd.deployments import cluster, generate_all

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

NUM_PROMPTS = 64
AT_ONCE = 16
SUBJECTS = ("rivers", "bread", "the moon", "old maps", "bees", "glass", "winter", "numbers")
FORMS = (
    "Tell me about {}.",
    "Write one sentence on {}.",
    "Why do people like {}?",
    "{} are",
    "A short list of facts about {}:\n1.",
    "Once upon a time there was a child who dreamed of {}. One day",
    "def describe():\n    return 'all that is known of {}:",
    "Translate into French: we talked about {} all evening long, and then",
)
GREEDY = {"temperature": 0.0, "max_tokens": 32}


def test_sixty_four_prompts_have_the_tokens_of_an_offline_run(tmp_path):
    prompts = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    assert len(prompts) == NUM_PROMPTS
    dtype = "model.dtype=float32"
    llm = OfflineInference(load_config([dtype, "data.input_truncated_len=128"]))
    expected = [r.token_ids for r in llm.generate(prompts, SamplingParams(**GREEDY))]
    with cluster(tmp_path, dtype) as service:
        bodies = [{"prompt": prompt, **GREEDY} for prompt in prompts]
        answers = generate_all(service.router, bodies, AT_ONCE)
        assert [answer["output_ids"] for answer in answers] == expected
        service.wait_until_idle()
        assert service.router.stats()["retries"] == 0
