"""From a batch to new tokens: inputs, forward, sampling."""
