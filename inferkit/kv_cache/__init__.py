"""Block accounting of the KV cache; knows no tensors."""
