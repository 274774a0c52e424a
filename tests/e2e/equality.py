"""The equality rule: equal greedy tokens, but for near-ties (design of the project: a first
differing token is accepted only if the reference's two best logits there differ by less than
1e-4; each such case is printed)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from inferkit.core.batch import Batch
from inferkit.core.step_output import StepOutput
from inferkit.offline.inference import OfflineInference

NEAR_TIE = 1e-4
Reference = list[tuple[list[int], list[float], torch.Tensor]]
"""(tokens, gaps, logits [n, V]) of each prompt; a gap is that of the two best logits."""


def assert_same_tokens(
    actual: Sequence[int], expected: Sequence[int], gaps: Sequence[float], *, case: str
) -> None:
    """`gaps[i]` is the distance of the reference's two best logits at position i."""
    for position, (ours, theirs) in enumerate(zip(actual, expected, strict=False)):
        if ours != theirs:
            assert gaps[position] < NEAR_TIE, (
                f"{case}: token {position} is {ours}, expected {theirs}; the two best logits "
                f"differ by {gaps[position]}"
            )
            print(f"near-tie accepted: {case}, token {position}, gap {gaps[position]}")
            return
    assert len(actual) == len(expected), f"{case}: {len(actual)} tokens, not {len(expected)}"


def hf_generate(
    directory: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int
) -> Reference:
    """Each prompt alone, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    for prompt in prompts:
        input_ids = torch.tensor([list(prompt)])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=num_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(output.logits)
        best = logits.topk(2).values
        tokens = output.sequences[0, len(prompt) :].tolist()
        results.append((tokens, (best[:, 0] - best[:, 1]).tolist(), logits))
    return results


class LogitsRecorder:
    """An engine that passes everything on and keeps the logits of each request."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.batches: list[Batch] = []

    def forward_batch(self, batch: Batch) -> StepOutput:
        output: StepOutput = self.engine.forward_batch(batch)
        self.batches.append(batch)
        if batch.is_dummy:
            return output
        assert output.logits is not None and output.logits.dtype is torch.float32
        sampling_rows = [row for row in batch.rows if row.samples]
        for row, logits in zip(sampling_rows, output.logits, strict=True):
            self.logits.setdefault(row.request_id, []).append(logits.clone())
        return output


def record_logits(llm: OfflineInference) -> LogitsRecorder:
    """Put a recorder between the scheduler and the engine."""
    recorder = LogitsRecorder(llm.parts.engine)
    llm.parts = replace(llm.parts, engine=recorder)  # type: ignore[arg-type]
    return recorder
