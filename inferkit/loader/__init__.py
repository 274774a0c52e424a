"""Where weights, configuration and tokenizer of a model come from."""
