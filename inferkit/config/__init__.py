"""Composition, checks and provenance of the typed configuration.

The only package, beside cli and sweep, that knows hydra and omegaconf.
"""
