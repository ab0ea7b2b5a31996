"""What the pictures show is what the weights hold."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import svb_jax

WIDE = {"first": {"kernel": jnp.diag(jnp.array([0.5, 1.0, 3.0]))}, "last": {"kernel": 2 * jnp.eye(2)}}


def spans(axes) -> list[list[float]]:
    """The ends of the horizontal lines of each layer: its range, then its middle 80 %."""
    return [
        [round(float(x), 3) for x in path.vertices[:, 0]]
        for lines in axes.collections
        for path in lines.get_paths()
    ]


def test_quantiles_draw_the_range_of_every_layer_over_the_band():
    (axes,) = svb_jax.plot_spectrum(WIDE, epsilon=0.25).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first/kernel", "last/kernel"]
    assert spans(axes) == [[0.5, 3.0], [0.6, 2.6], [2.0, 2.0], [2.0, 2.0]]
    (band,) = axes.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((0.8, 1.25))
    assert axes.get_xscale() == "log"
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([1.0, 2.0])


def test_a_notebook_shows_the_figure_without_pyplot():
    assert svb_jax.plot_spectrum(WIDE)._repr_png_().startswith(b"\x89PNG")


def test_before_is_drawn_behind():
    (axes,) = svb_jax.plot_spectrum(svb_jax.project(WIDE, 0.25), before=WIDE).axes
    assert spans(axes)[::2] == [[0.5, 3.0], [2.0, 2.0], [0.8, 1.25], [1.25, 1.25]]
    assert legend_names(axes)[:3] == ["band 0.667 to 1.5", "before", "now"]


def legend_names(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_legend_explains_lines_and_dots():
    (axes,) = svb_jax.plot_spectrum(WIDE).axes
    assert legend_names(axes) == ["band 0.667 to 1.5", "now", "all values", "middle 80 %", "median"]
    (axes,) = svb_jax.plot_spectrum(WIDE, before=WIDE, kind="histogram").axes
    assert legend_names(axes) == ["band 0.667 to 1.5", "before", "now"]


def test_histograms_hold_every_value():
    (axes,) = svb_jax.plot_spectrum(WIDE, kind="histogram").axes
    first, last = axes.patches[1:]
    counts, edges, _ = first.get_data()
    # As high as the largest bin: three values in three bins.
    assert sorted(0 - counts)[-3:] == pytest.approx([0.85] * 3)
    inside = [edges[i] <= 3.0 <= edges[i + 1] for i in range(len(counts)) if counts[i] < 0]
    assert inside == [False, False, True]
    assert sorted(1 - last.get_data()[0])[-1] == pytest.approx(0.85)


def test_a_vanished_value_needs_a_linear_axis():
    (axes,) = svb_jax.plot_spectrum({"kernel": jnp.diag(jnp.array([0.0, 1.0]))}).axes
    assert axes.get_xscale() == "linear"


def test_what_rounding_leaves_of_zero_is_drawn_as_zero():
    (axes,) = svb_jax.plot_spectrum({"kernel": np.outer(np.ones(40), np.ones(30))}).axes
    assert axes.get_xscale() == "linear"
    assert spans(axes)[0] == [0.0, pytest.approx(1200**0.5, abs=1e-3)]


def test_a_band_of_one_value_can_be_seen():
    (axes,) = svb_jax.plot_spectrum(WIDE, epsilon=0).axes
    (band,) = axes.patches
    assert band.get_linewidth() > 0
    assert band.get_edgecolor()[3] > 0


def test_names_are_no_formulas():
    # As a formula this one could not be parsed.
    svb_jax.plot_spectrum({"a$^$": WIDE["last"]})._repr_png_()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"epsilon": -1}, "plot_spectrum needs"),
        ({"kind": "violin"}, "needs kind='quantiles' or kind='histogram', got 'violin'"),
        ({"before": {"first": WIDE["first"]}}, "same matrices before and now, got .'last/kernel'"),
        ({"params": {"kernel": jnp.full((2, 2), jnp.nan)}}, "finite weights, got NaN or infinity in kernel"),
    ],
)
def test_wrong_calls_are_told_what_is_needed(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        svb_jax.plot_spectrum(**{"params": WIDE, **arguments})


def line(step, low, high, share, name="svb"):
    numbers = {"step": step, "sigma_min": low, "sigma_max": high, "share_clipped": share}
    return {f"{name}/{key}": value for key, value in numbers.items()}


def test_projections_over_time_count_each_once():
    history = [
        line(0, None, None, None),
        line(4, 0.5, 3.0, 0.4),
        line(4, 0.5, 3.0, 0.4),
        line(8, 0.7, 1.6, 0.1),
    ]
    above, below = svb_jax.plot_projections(history, epsilon=0.5).axes
    largest, smallest = above.lines
    assert (list(largest.get_xdata()), list(largest.get_ydata())) == ([4, 8], [3.0, 1.6])
    assert list(smallest.get_ydata()) == [0.5, 0.7]
    assert list(below.lines[0].get_ydata()) == [0.4, 0.1]


def test_projections_take_what_the_optimizer_reports():
    tx = svb_jax.bound_singular_values(0.5, every=2)
    state, history = tx.init(WIDE), []
    for _ in range(4):
        _, state = tx.update(
            {"first": {"kernel": jnp.zeros((3, 3))}, "last": {"kernel": jnp.zeros((2, 2))}}, state, WIDE
        )
        history.append(svb_jax.projection_stats(state))
    above, _ = svb_jax.plot_projections(history).axes
    assert list(above.lines[0].get_xdata()) == [2, 4]
    np.testing.assert_allclose(above.lines[0].get_ydata(), [3.0, 3.0], rtol=1e-5)


def test_projections_need_one():
    with pytest.raises(ValueError, match="has a projection been due yet"):
        svb_jax.plot_projections([line(0, float("nan"), float("nan"), float("nan"))])


def test_one_projection_is_not_a_history():
    with pytest.raises(TypeError, match="needs a list of what projection_stats returned"):
        svb_jax.plot_projections(line(4, 0.5, 3.0, 0.4))


def test_matplotlib_is_imported_when_something_is_drawn():
    code = "import sys, svb_jax; assert 'matplotlib' not in sys.modules; svb_jax.plot_spectrum"
    subprocess.run([sys.executable, "-c", code], check=True)
