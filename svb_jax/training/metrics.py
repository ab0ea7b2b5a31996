"""Loss and errors, summed on the device and read by the host when it has time."""

import flax.struct
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class Totals:
    """Sums over the examples seen so far."""

    loss: jax.Array
    wrong: jax.Array
    wrong_top5: jax.Array
    count: jax.Array

    def __add__(self, other: "Totals") -> "Totals":
        return jax.tree.map(jnp.add, self, other)

    def means(self) -> dict[str, jax.Array]:
        """Return the mean loss, and the top-1 and top-5 errors in percent."""
        return {
            "loss": self.loss / self.count,
            "error": 100.0 * self.wrong / self.count,
            "error_top5": 100.0 * self.wrong_top5 / self.count,
        }


def zero_totals() -> Totals:
    """Return the sums over no example."""
    zero = jnp.zeros((), jnp.int32)
    return Totals(jnp.zeros(()), zero, zero, zero)


def count_errors(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> Totals:
    """Sum cross-entropy and errors over a batch.

    Args:
      logits: (batch, classes).
      labels: Integers, (batch,).
      mask: Booleans, (batch,): false for the examples that only fill up the batch.

    Returns:
      The sums over the batch.

    Examples:
      >>> totals = count_errors(jnp.array([[0.0, 9.0], [0.0, 9.0]]), jnp.array([1, 0]))
      >>> int(totals.wrong), int(totals.count)
      (1, 2)
    """
    mask = jnp.ones(labels.shape, bool) if mask is None else mask
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    rank = _rank(logits, labels)
    return Totals(
        loss=jnp.sum(jnp.where(mask, losses, 0.0)),
        wrong=jnp.sum(mask & (rank >= 1), dtype=jnp.int32),
        wrong_top5=jnp.sum(mask & (rank >= 5), dtype=jnp.int32),
        count=jnp.sum(mask, dtype=jnp.int32),
    )


def _rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return how many classes come before the right one, ties in the order of the classes."""
    right = jnp.take_along_axis(logits, labels[:, None], axis=1)
    earlier = jnp.arange(logits.shape[1])[None] < labels[:, None]
    # Not `logits > right`: a network that answers NaN would then be right about everything.
    return jnp.sum(~(logits <= right) | (earlier & (logits == right)), axis=1)
