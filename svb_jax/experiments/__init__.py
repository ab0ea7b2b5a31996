"""The paper's experiments, and the command line: ``svb``, or ``python -m experiments`` in a checkout."""
