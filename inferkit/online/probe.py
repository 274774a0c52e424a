"""The first generation of every DP rank, before clients ask for one."""

from inferkit.core.sampling_params import SamplingParams
from inferkit.online.dispatcher import DPDispatcher
from inferkit.online.errors import GenerationFailed
from inferkit.online.instance import draw_room
from inferkit.online.work import Work

PROBE_LIMIT_S = 600.0
"""The first generation may compile."""


async def probe_ranks(dispatcher: DPDispatcher) -> None:
    """Generate one token on each.

    Raises:
        ServiceError: one of them could not.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    streams = [
        dispatcher.submit(
            Work(
                token_ids=[0],
                sampling=sampling,
                seed=0,
                room=draw_room(),
                request_id="probe",
                remaining_s=PROBE_LIMIT_S,
            ),
            dp_rank=dp_rank,
        )
        for dp_rank in range(dispatcher.dp_size)
    ]
    for stream in streams:
        outputs = [output async for output in stream]
        if not any(output.token_ids for output in outputs):
            raise GenerationFailed(
                f"DP rank {stream.dp_rank} generated nothing: {outputs[-1].finish_detail}"
            )
