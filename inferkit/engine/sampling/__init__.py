"""The parts of the sampler: noise, penalties, filters, log-probabilities."""
