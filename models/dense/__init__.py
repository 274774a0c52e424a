"""Dense decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3."""
