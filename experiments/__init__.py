"""The records of the paper's experiments (``results/``), and ``python -m experiments`` in a checkout.

The code is in ``svb_jax.experiments``, so that it ships with the wheel.
"""
