"""A batch of equal matrices, each with its band."""

from typing import NamedTuple

import jax


class Batch(NamedTuple):
    """Matrices of one shape and type.

    Attributes:
      matrices: (b, m, n), in float32 or float64.
      lower: (b,), the band's lower end for each.
      upper: (b,), the band's upper end for each.
      is_active: (b,), which of them to clip; the others are left alone.
    """

    matrices: jax.Array
    lower: jax.Array
    upper: jax.Array
    is_active: jax.Array
