"""Rules between a configuration and the model that it runs; the model's shape is known."""

from typing import Any

from inferkit.config.faults import Findings
from inferkit.config.schema import InferenceConfig
from inferkit.config.shares import num_experts
from inferkit.core.errors import ConfigError


def check_model(resolved: InferenceConfig, arch: Any, findings: Findings) -> None:
    """Apply every rule of this page; `arch` is what `parse_arch` of the family returned."""
    _context(resolved, arch, findings)
    if resolved.role == "router":
        return  # it runs no model
    _prefix_cache(resolved, arch, findings)
    _experts(resolved, arch, findings)


def require_model(resolved: InferenceConfig, arch: Any) -> None:
    """The same for a worker, which knows the model only after its files have come.

    Raises:
        ConfigError: names every fault.
    """
    findings = Findings()
    check_model(resolved, arch, findings)
    if findings.faults:
        raise ConfigError("\n".join(map(str, findings.faults)))


def _context(resolved: InferenceConfig, arch: Any, findings: Findings) -> None:
    """A request may not be longer than the positions that the model knows."""
    limit, positions = resolved.engine.max_model_len, int(arch.max_context_len)
    if limit > positions:
        data, scheduler = resolved.data, resolved.scheduler
        problem = f"the model knows {positions} positions; allowed is <= {positions}"
        if limit == data.input_truncated_len + scheduler.max_new_tokens:
            problem += (
                f" (it is data.input_truncated_len={data.input_truncated_len} + "
                f"scheduler.max_new_tokens={scheduler.max_new_tokens}; lower one of them)"
            )
        findings.refuse("engine.max_model_len", limit, problem, use=positions)


def _prefix_cache(resolved: InferenceConfig, arch: Any, findings: Findings) -> None:
    depends = getattr(arch, "keys_depend_on_prompt_len", None)
    limit = resolved.engine.max_model_len
    if resolved.kv_cache.enable_prefix_cache and depends is not None and depends(limit):
        findings.refuse(
            "kv_cache.enable_prefix_cache",
            True,
            f"cannot be used up to engine.max_model_len={limit}: with this model's rope scaling "
            "the keys of a prefix depend on the length of the whole prompt",
            use=False,
            related=("engine.max_model_len",),
        )


def _experts(resolved: InferenceConfig, arch: Any, findings: Findings) -> None:
    """Experts are not padded: each rank of an expert-parallel group holds as many."""
    count, parallel = num_experts(arch), resolved.parallel
    if not count:
        if resolved.model.force_eplb:
            name = getattr(arch, "architecture", resolved.model.name)
            problem = f"needs a mixture-of-experts model, and {name} has no experts"
            findings.refuse("model.force_eplb", True, problem, use=False)
        return
    if count % parallel.moe_ep_size == 0:
        return
    world, attn = parallel.world_size, parallel.attn_tp_size
    nested = [n for n in range(1, world + 1) if world % n == 0 and max(n, attn) % min(n, attn) == 0]
    allowed = [n for n in nested if count % (world // n) == 0]
    findings.refuse(
        "parallel.moe_tp_size",
        parallel.moe_tp_size,
        f"spreads the model's num_experts={count} (model.arch or its config.json) over "
        f"moe_ep_size={parallel.moe_ep_size} ranks (world_size={world} / moe_tp_size), which does "
        f"not divide it; allowed is {', '.join(map(str, allowed))}",
        use=allowed[0],
        related=("parallel.world_size",),
    )
