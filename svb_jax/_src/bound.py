"""A bound as users hold it: a link of an optimizer's chain, or a step of its own after the optimizer's."""

from typing import Any

import optax

from svb_jax._src.apply_every import IS_STEPPED


class Bound(optax.GradientTransformationExtraArgs):
    """A bound: a link of an optimizer's chain, or a step of its own after the optimizer's.

    As a link, put last in ``optax.chain``, it replaces updates by those that end at the bounded point. Each
    update must then be stored before the conditional in a kernel of its own. :meth:`apply` bounds the
    parameters themselves: on steps where nothing is due a program costs what it costs without a bound.

    Example:
      >>> import svb_jax
      >>> isinstance(svb_jax.bound_singular_values(epsilon=0.5), svb_jax.Bound)
      True
    """

    def apply(self, params: optax.Params, state: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Return the parameters after a step, bounded if it is due, and the new state.

        Args:
          params: The parameters, after ``optax.apply_updates``.
          state: What ``init`` or the last call returned.
          **extra_args: ``batch_stats``, as ``update`` takes it.

        Example:
          >>> import jax.numpy as jnp, numpy as np, svb_jax
          >>> bound = svb_jax.bound_singular_values(epsilon=0.5, every=2)
          >>> params = {"kernel": jnp.diag(jnp.array([3.0, 1.0, 0.1]))}
          >>> state = bound.init(params)
          >>> for _ in range(2):
          ...     params, state = bound.apply(params, state)
          ...     print(np.diag(params["kernel"]).round(4))
          [3.  1.  0.1]
          [1.5    1.     0.6667]
        """
        return self.update(params, state, params, **extra_args, **{IS_STEPPED: True})
