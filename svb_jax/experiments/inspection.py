"""``svb inspect``: the spectrum of a checkpoint or of any weights, as a table and a plot.

Needs no extra for ``.npz`` and safetensors files: argparse reads its options, and matplotlib only draws.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import svb_jax
from svb_jax._src.extras import needs_extra
from svb_jax._src.masks import check_patterns
from svb_jax.experiments.weights import Weights, load_weights, nested

LAYOUTS = {
    "by-name": svb_jax.by_name,
    "oihw": svb_jax.oihw,
    "attention": svb_jax.attention,
    "every-matrix": svb_jax.every_matrix,
}
HINT = (
    "Name its layout: --layout oihw (outputs first), attention or every-matrix, and --scan NAME for stacked "
    "layers. Or leave it out: --skip PATTERN."
)
NO_MATRIX_HINT = "--layout every-matrix takes all arrays of rank two and more"
# What the help and the guide name.
FIGURE_TYPES = (".png", ".svg", ".pdf")
HELP = {
    "path": "an .npz, .safetensors or Flax .msgpack file, a folder of safetensors, an Orbax checkpoint, or "
    "the folder of a run",
    "epsilon": "count the values in the band [1 / (1 + epsilon), 1 + epsilon] (default: 0.5)",
    "layout": "by-name: kernels called kernel, w or weight, the output last, as in Flax and Haiku (default); "
    "oihw: the output first, as in PyTorch and Equinox; attention: Flax's attention kernels too; "
    "every-matrix: all arrays of rank two and more, the output last",
    "scan": "a module whose layers nn.scan or nn.vmap stacked along the first axis; can be repeated",
    "only": "a pattern of paths to look at, as svb_jax.paths has them: encoder, 'Conv_*', '*/query/kernel'; "
    "can be repeated",
    "skip": "a pattern of paths to leave out; can be repeated",
    "plot": "draw the spectrum to this file (.png, .svg, .pdf)",
    "kind": "what to draw of each layer (default: quantiles)",
    "overwrite": "let --plot replace a file",
}


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print the singular values of a network's weights, and plot them."""

    path: Path
    epsilon: float = 0.5
    layout: str = "by-name"
    scan: Sequence[str] = ()
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    plot: Path | None = None
    kind: str = "quantiles"
    overwrite: bool = False

    @classmethod
    def parse(cls, arguments: Sequence[str], prog: str) -> Self:
        """Return the options; --help and what does not parse end the process."""
        parser = argparse.ArgumentParser(prog=prog, description=cls.__doc__)
        parser.add_argument("path", type=Path, metavar="PATH", help=HELP["path"])
        parser.add_argument("--epsilon", type=float, help=HELP["epsilon"])
        parser.add_argument("--layout", choices=LAYOUTS, help=HELP["layout"])
        parser.add_argument("--scan", action="append", metavar="NAME", help=HELP["scan"])
        parser.add_argument("--only", action="append", metavar="PATTERN", help=HELP["only"])
        parser.add_argument("--skip", action="append", metavar="PATTERN", help=HELP["skip"])
        parser.add_argument("--plot", type=Path, metavar="FILE", help=HELP["plot"])
        parser.add_argument("--kind", choices=("quantiles", "histogram"), help=HELP["kind"])
        parser.add_argument("--overwrite", action="store_true", help=HELP["overwrite"])
        given = vars(parser.parse_args(arguments))
        return cls(**{name: value for name, value in given.items() if value is not None})

    def run(self) -> None:
        """Print the table; draw the plot and say where it is, if one was asked for."""
        self._check_plot()
        weights = nested(self._chosen(load_weights(self.path)))
        layout = LAYOUTS[self.layout]
        dimension_numbers = svb_jax.scan_stacks(*self.scan, inner=layout) if self.scan else layout
        try:
            print(svb_jax.spectrum_summary(weights, self.epsilon, dimension_numbers=dimension_numbers))
        except ValueError as error:
            message = _in_words_of_the_command_line(str(error))
            if message == str(error):
                raise
            raise ValueError(message) from error
        if self.plot is not None:
            options: Any = {"kind": self.kind, "dimension_numbers": dimension_numbers}
            figure = svb_jax.plot_spectrum(weights, self.epsilon, **options)
            self.plot.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.plot, dpi=130)
            print(f"Wrote {self.plot.absolute()}")

    def _check_plot(self) -> None:
        """Raise now what drawing would raise minutes later, after a large network's spectrum."""
        if self.plot is None:
            return
        if self.plot.suffix.lower() not in FIGURE_TYPES:
            raise ValueError(f"inspect --plot writes {', '.join(FIGURE_TYPES)}, got {self.plot}.")
        if self.plot.exists() and not self.overwrite:
            raise FileExistsError(f"{self.plot} is there already: --overwrite replaces it.")
        with needs_extra("inspect --plot", "plot"):
            import matplotlib  # noqa: F401

    def _chosen(self, weights: Weights) -> Weights:
        if not weights:
            raise ValueError(
                f"inspect needs floating-point weights of 16 bits or more, got none in {self.path}."
            )
        check_patterns("inspect", [*self.only, *self.skip], weights)
        mask = svb_jax.paths(*self.only, exclude=self.skip)(weights)
        return {path: array for path, array in weights.items() if mask[path]}


def _in_words_of_the_command_line(message: str) -> str:
    problem, argument, _ = message.partition(" Say so with dimension_numbers=")
    if argument:
        return f"{problem} {HINT}"
    return message.replace(
        "unless dimension_numbers= says otherwise (svb_jax.every_matrix takes all)", f"({NO_MATRIX_HINT})"
    )
