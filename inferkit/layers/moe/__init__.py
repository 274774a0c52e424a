"""Mixture of experts: who computes which tokens (tokens), how they travel (dispatch), experts."""
