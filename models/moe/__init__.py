"""Decoders with routed experts: Qwen3-MoE and Mixtral."""
