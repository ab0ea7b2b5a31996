"""Every test runs on eight virtual CPU devices, with no environment variable set."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
