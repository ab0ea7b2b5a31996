"""Singular Value Bounding and Bounded Batch Normalization for JAX."""
