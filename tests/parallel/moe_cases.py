"""What ranks run in tests of the expert layer; module functions, so that a pool can call them.

Every rank makes all weights and all tokens from seeds, computes the layer over the ranks and by
itself, and returns how far the two are apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from inferkit import OfflineInference, SamplingParams, load_config
from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.core.parallel_layout import ParallelLayout
from inferkit.core.place import RankPlace
from inferkit.layers.context import ModelContext
from inferkit.layers.functional import silu_and_mul
from inferkit.layers.moe.block import ExpertParallelMoE
from inferkit.parallel.comm_manager import CommManager
from inferkit.platforms.cpu import CpuPlatform

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 16, 10  # no tp size above 2 divides INNER

SKEWS: dict[str, list[float]] = {
    "even": [0.0] * NUM_EXPERTS,
    "first": [1e3, 1e3] + [0.0] * (NUM_EXPERTS - 2),
    "last": [0.0] * (NUM_EXPERTS - 1) + [1e3],
    "ends": [1e3] + [0.0] * (NUM_EXPERTS - 2) + [1e3],
}
"""What is added to the router's logits: with "first" all tokens choose experts 0 and 1."""


@dataclass(frozen=True)
class MoECase:
    """One layer call. `num_tokens` has those of every DP rank, `num_padding` the last of them."""

    attn_tp_size: int
    moe_tp_size: int
    num_tokens: tuple[int, ...]
    is_prefill: bool
    skew: str = "even"
    num_padding: tuple[int, ...] = ()
    is_packed: bool = False
    force_eplb: bool = False
    is_warm_up: bool = False


class RoutedMoE(ExpertParallelMoE):
    """A softmax router over whole weights, with a skew."""

    def __init__(self, skew: str, *, bias: bool = False, ctx: ModelContext) -> None:
        super().__init__(
            num_experts=NUM_EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            bias=bias,
            ctx=ctx,
        )
        self.skew = skew

    def route(self, x_GH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(x_GH, self.skew)


class CountedTensor:
    """A checkpoint tensor in memory, which knows how many of its elements were read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.num_read = 0

    def read(self, *index: slice) -> torch.Tensor:
        part = self.tensor[index]
        self.num_read += part.numel()
        return part


def choose(x_GH: torch.Tensor, skew: str) -> tuple[torch.Tensor, torch.Tensor]:
    logits_GE = x_GH @ random("router", HIDDEN, NUM_EXPERTS) + torch.tensor(SKEWS[skew])
    return logits_GE.softmax(-1).topk(TOP_K)


def random(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


def expert_weights(expert: int) -> dict[str, torch.Tensor]:
    return {
        "gate_proj": random(f"gate{expert}", INNER, HIDDEN),
        "up_proj": random(f"up{expert}", INNER, HIDDEN),
        "down_proj": random(f"down{expert}", HIDDEN, INNER),
    }


def expected(x_TH: torch.Tensor, skew: str) -> torch.Tensor:
    """The layer as its definition has it."""
    weights_TK, ids_TK = choose(x_TH, skew)
    out = torch.zeros_like(x_TH)
    for token, (weights, ids) in enumerate(zip(weights_TK, ids_TK, strict=True)):
        for weight, expert in zip(weights, ids.tolist(), strict=True):
            of = expert_weights(expert)
            h = silu_and_mul(torch.cat((of["gate_proj"], of["up_proj"])) @ x_TH[token])
            out[token] += weight * F.linear(h, of["down_proj"])
    return out


def make_metadata(case: MoECase, dp_rank: int, *, is_lock_step: bool) -> ForwardMetaData:
    """Nothing but what the layer reads."""
    num_tokens = case.num_tokens[dp_rank]
    num_padding = (case.num_padding or (0,) * len(case.num_tokens))[dp_rank]
    unused: dict[str, Any] = dict.fromkeys(ForwardMetaData.__dataclass_fields__)
    return ForwardMetaData(
        **unused
        | {
            "is_prefill": case.is_prefill,
            "dp_is_prefill": case.is_prefill,
            "prompt_len": torch.tensor([7] * (num_tokens - num_padding) + [0] * num_padding),
            "dp_num_tokens": case.num_tokens if is_lock_step else None,
            "is_warm_up": case.is_warm_up,
        }
    )


def run_case(rank: int, world_size: int, case: MoECase) -> tuple[float, list[int], int]:
    """(largest difference, expert counts that this rank answers for, number of collectives)."""
    sizes = {f"{kind}_tp_size": case.attn_tp_size for kind in ("attn", "embed", "lmhead", "dense")}
    layout = ParallelLayout(
        world_size=world_size,
        **sizes,
        shared_tp_size=case.attn_tp_size,
        o_proj_tp_size=case.attn_tp_size,
        moe_tp_size=case.moe_tp_size,
    )
    comm = CommManager(layout, rank=rank)
    ctx = ModelContext(
        platform=CpuPlatform(),
        dtype=torch.float32,
        block_size=1,
        comm=comm,
        force_eplb=case.force_eplb,
    )
    try:
        layer = RoutedMoE(case.skew, ctx=ctx)
        load_experts(layer)
        if case.is_packed:
            layer.experts.pack()
        x_TH = random(f"tokens{comm.dp_rank}", case.num_tokens[comm.dp_rank], HIDDEN)
        metadata = make_metadata(case, comm.dp_rank, is_lock_step=comm.joins_dp_ranks)
        num_calls = comm.timer.num_calls
        with torch.inference_mode():
            out_TH = layer(x_TH, metadata)
        num_calls = comm.timer.num_calls - num_calls
    finally:
        comm.close()
    difference = 0.0
    if not case.force_eplb:
        difference = float((out_TH - expected(x_TH, case.skew)).abs().max())
    return difference, layer.load.counts.tolist(), num_calls


def load_experts(layer: ExpertParallelMoE) -> None:
    """Give the layer all experts of the checkpoint; it reads its share, and nothing else."""
    num_read, experts = 0, layer.experts
    for expert in range(NUM_EXPERTS):
        for name, weight in expert_weights(expert).items():
            stored = CountedTensor(weight)
            experts.load_tensor(f"{expert}.{name}.weight", stored)
            num_read += stored.num_read
    start = experts.tp_rank * experts.local_size
    inner = max(0, min(experts.local_size, INNER - start))
    assert num_read == experts.num_local * 3 * HIDDEN * inner


def run_cases(place: RankPlace, cases: list[MoECase]) -> list[tuple[float, list[int], int]]:
    return [run_case(place.rank, place.world_size, case) for case in cases]


def chosen(case: MoECase) -> list[int]:
    """Tokens per expert over all DP ranks, padding left out."""
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for dp_rank, num_tokens in enumerate(case.num_tokens):
        num_padding = (case.num_padding or (0,) * len(case.num_tokens))[dp_rank]
        x_TH = random(f"tokens{dp_rank}", num_tokens, HIDDEN)[: num_tokens - num_padding]
        counts += torch.bincount(choose(x_TH, case.skew)[1].flatten(), minlength=NUM_EXPERTS)
    return counts.tolist()


def generate_and_count(
    place: RankPlace,
    overrides: list[str],
    prompts: list[list[int]],
    num_new_tokens: int,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """Greedy tokens, forward passes of this rank without warm-up, and the load of the experts."""
    llm = OfflineInference(load_config(overrides), place=place)
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    llm.parts.engine.worker.model.model.norm.register_forward_hook(count)
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=ignore_eos)
    try:
        results = llm.generate(prompts, params)
        load = llm.parts.engine.expert_load()
    finally:
        llm.parts.comm.close()
    return {
        "tokens": [result.token_ids for result in results],
        "num_forwards": num_forwards,
        "load": load,
        "num_computed_tokens": sum(record.num_tokens for record in llm.step_records),
    }
