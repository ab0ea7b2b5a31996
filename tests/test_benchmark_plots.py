"""The pictures of measurements: what an axis begins with, and what a row's point and line mean."""

import pytest
from matplotlib.figure import Figure

from benchmarks import plots
from benchmarks.tables import section


def timed(label: str, *seconds: float) -> dict:
    least, median, most = sorted(seconds)
    return {"label": label, "median": median, "least": least, "most": most, "seconds": list(seconds)}


def panel(*rows: dict, plot: str = "median"):
    axes = Figure().subplots()
    plots.draw_section(axes, section("a network", {row["label"]: row for row in rows}, plot))
    return axes


def points(axes) -> list[tuple[float, float]]:
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines]


def test_an_axis_begins_at_zero_where_the_figures_have_room_on_it():
    axes = panel(timed("svb_jax auto", 2.0, 2.5, 3.0), timed("peer", 60.0, 80.0, 90.0))
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] > 90


def test_an_axis_is_logarithmic_where_the_smallest_would_be_at_zero():
    axes = panel(timed("svb_jax auto", 1.0, 2.0, 3.0), timed("peer", 60.0, 180.0, 200.0))
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    assert 0 < low < 1.0 < 200.0 < high


def test_a_row_is_its_median_on_a_line_from_least_to_most():
    axes = panel(timed("svb_jax auto", 1.0, 2.0, 5.0), timed("peer", 3.0, 4.0, 9.0))
    assert points(axes) == [(2.0, 0), (4.0, 1)]
    ends = [line.get_segments()[0][:, 0].tolist() for line in axes.collections]
    assert ends == [[1.0, 5.0], [3.0, 9.0]]
    # The first row is on top.
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["svb_jax auto", "peer"]


def test_what_is_done_by_hand_is_not_shown_as_ours():
    axes = panel(*(timed(label, 1.0, 1.0, 1.0) for label in ("SVB+BBN", "SVB and BBN by hand", "SGD")))
    assert [line.get_color() for line in axes.lines] == [plots.OURS, plots.OTHER, plots.OTHER]


@pytest.mark.parametrize(
    ("plot", "label", "tick"), [("median", "time", "2 s"), ("cycles_due", "cycles", "2 M")]
)
def test_axes_name_what_they_measure_with_its_unit(plot, label, tick):
    value = 2.0 if plot == "median" else 2_000_000
    axes = panel({"label": "svb_jax auto", plot: value}, {"label": "floor", plot: value / 4}, plot=plot)
    assert label in axes.get_xlabel()
    axes.figure.draw_without_rendering()
    assert tick in [text.get_text() for text in axes.get_xticklabels()]
