"""Optional dependencies: a missing one is answered with the extra to install."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Name the extra when an import inside the block finds a package missing.

    Args:
      what: The module or function that needs it.
      extra: The extra of ``svb_jax`` that brings it.

    Raises:
      ModuleNotFoundError: With the command that installs what is missing.

    Example:
      >>> with needs_extra("svb_jax.training", "train"):
      ...     import a_package_that_is_missing
      Traceback (most recent call last):
          ...
      ModuleNotFoundError: svb_jax.training needs a_package_that_is_missing, which is not installed:
      pip install 'svb_jax[train]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # A module of our own that is missing is a fault, and one whose extra is already named says enough.
        if error.name is None or error.name.startswith("svb_jax"):
            raise
        package = error.name.partition(".")[0]
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'svb_jax[{extra}]'"
        ) from error
