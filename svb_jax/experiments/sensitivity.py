"""How sensitive a function is to its input: the largest singular value of its Jacobian."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

POWER_STEPS = 30


def jacobian_norms(function: Callable[[jax.Array], jax.Array], points: jax.Array) -> jax.Array:
    """Return the spectral norm of the Jacobian at each point, by 30 steps of power iteration.

    It is the factor by which the function stretches the worst small change of its input: a lower bound of its
    Lipschitz constant.

    Args:
      function: From one point to an array.
      points: Stacked along the first axis.

    Returns:
      One norm a point.

    Example:
      >>> stretch = jnp.array([3.0, 1.0])
      >>> jacobian_norms(lambda x: stretch * x, jnp.ones((1, 2))).round(4).tolist()
      [3.0]
    """

    def norm(point: jax.Array, key: jax.Array) -> jax.Array:
        value, pull_back = jax.vjp(function, point)

        def step(_: int, direction: jax.Array) -> jax.Array:
            _, stretched = jax.jvp(function, (point,), (direction / jnp.linalg.norm(direction),))
            return pull_back(stretched)[0]

        start = jax.random.normal(key, point.shape, value.dtype)
        # The iterated product of Jᵀ J grows by the squared norm at every step.
        return jnp.sqrt(jnp.linalg.norm(jax.lax.fori_loop(0, POWER_STEPS, step, start)))

    keys = jax.random.split(jax.random.key(0), len(points))
    return jax.jit(jax.vmap(norm))(points, keys)
