"""What ranks run in tests of this family; module functions, so that a pool can call them."""

from inferkit import OfflineInference, load_config
from inferkit.core.place import RankPlace


def held_and_expected(place: RankPlace, overrides: list[str]) -> tuple[int, int]:
    """Weights that a rank holds with the MTP layers, and what the architecture says, in bytes."""
    llm = OfflineInference(load_config([*overrides, "model.dtype=float32"]), place=place)
    try:
        worker, layout = llm.parts.engine.worker, llm.parts.comm.layout
        arch = worker.model.arch
        expected = arch.num_parameters_of_rank(layout) + arch.num_mtp_parameters_of_rank(layout)
        return worker.num_weight_bytes, 4 * expected
    finally:
        llm.parts.comm.close()
