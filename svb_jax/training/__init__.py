"""Training under spectral constraints: data, a data-parallel loop, checkpoints, many hosts."""
