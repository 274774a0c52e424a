"""The content of metrics.json of a load, from what became of its requests.

Names that an offline run has too mean the same, as a client sees it (`inferkit.offline.metrics`).

    num_failed           requests without a whole answer; the other figures leave them out, except
                         num_requests and wall_time_s
    load_time_s          from the start of the service to when it took requests
    wall_time_s          first request sent - end of the last answer
    request_per_s        whole answers over wall_time_s
    *_tokens_per_s       tokens of prompts, of answers and of both, over wall_time_s
    ttft_s, tpot_s, e2e_s  per request, see `inferkit.bench.load.client`
    send_delay_s         sent - due, per request of a load with a rate: how late this client was
    client_cpu_share     CPU time of this client over the time of the load: near 1, it is what was
                         measured (a token takes it about 0.1 ms)
    num_devices          ranks of all instances of the service
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from inferkit.bench.load.client import Outcome
from inferkit.offline.metrics import statistics


def collect_load_metrics(
    outcomes: Sequence[Outcome],
    *,
    has_rate: bool,
    load_time_s: float,
    client_cpu_s: float,
    num_devices: int,
) -> dict[str, Any]:
    """Plain JSON data; see the definitions above."""
    whole = [outcome for outcome in outcomes if outcome.is_ok]
    num_prompt = sum(outcome.num_prompt_tokens for outcome in whole)
    num_output = sum(len(outcome.token_ids) for outcome in whole)
    ends_s = [outcome.sent_s + (outcome.e2e_s or 0.0) for outcome in outcomes]
    wall_time_s = max(ends_s) - min(outcome.sent_s for outcome in outcomes)

    def per_second(count: float) -> float | None:
        return count / wall_time_s if wall_time_s > 0 else None

    delays = [outcome.sent_s - outcome.due_s for outcome in outcomes] if has_rate else []
    return {
        "num_requests": len(outcomes),
        "num_failed": len(outcomes) - len(whole),
        "finish_reasons": dict(Counter(outcome.finish_reason for outcome in outcomes)),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "load_time_s": load_time_s,
        "wall_time_s": wall_time_s,
        "request_per_s": per_second(len(whole)),
        "prompt_tokens_per_s": per_second(num_prompt),
        "output_tokens_per_s": per_second(num_output),
        "total_tokens_per_s": per_second(num_prompt + num_output),
        "ttft_s": statistics([outcome.ttft_s for outcome in whole]),
        "tpot_s": statistics([outcome.tpot_s for outcome in whole]),
        "e2e_s": statistics([outcome.e2e_s for outcome in whole]),
        "send_delay_s": statistics(delays),
        "client_cpu_share": per_second(client_cpu_s),
        "num_devices": num_devices,
    }
