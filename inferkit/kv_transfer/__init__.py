"""Moves the KV cache of a request from a prefill to a decode instance."""
