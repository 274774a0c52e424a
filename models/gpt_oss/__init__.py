"""gpt-oss: experts with biases, attention sinks, sliding windows in every other layer."""
