"""The paper's experiments, and the command line: ``python -m experiments``."""
