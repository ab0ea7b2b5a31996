"""The routes that the library itself offers."""

import typing

import svb_jax

METHODS: tuple[str, ...] = typing.get_args(typing.get_type_hints(svb_jax.clip_singular_values)["method"])
