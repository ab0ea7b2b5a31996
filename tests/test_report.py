"""Reports on run folders written by hand: what is counted, what is compared, what the page holds."""

import dataclasses
import json
import math
import os
import re
import shutil
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from svb_jax.experiments import (
    catalogue,
    comparison,
    convergence,
    figure1,
    plots,
    record,
    report,
    table1,
    table2,
    tables,
)
from svb_jax.experiments.__main__ import main
from svb_jax.experiments.experiment import Experiment
from svb_jax.training.durable import RUN_FILES, write_sums

ERRORS = {"sgd": (50.0, 52.0, 54.0), "svb": (45.0, 46.0, 47.0), "svb+bbn": (44.0, 48.0, 49.0)}


def write_run(root: Path, experiment: Experiment, row: str, seed: int, error: float, scale="small") -> Path:
    """A finished run of six epochs whose error is given, and 20 points more in the first half."""
    config = experiment.configure(row, scale=scale, seed=seed, runs=root)
    bounded = experiment.method(row) != "sgd"
    lines = [
        {
            "step": 10 * epoch,
            "epoch": epoch,
            "test_error": error + 20 * (epoch <= 3),
            "learning_rate": 0.123456789,
        }
        | ({"svb/sigma_min": 0.5, "svb/sigma_max": 1.75} if bounded else {})
        for epoch in range(1, 7)
    ]
    result = {
        "test_error": error,
        "best_test_error": error - 0.25,
        "test_error_projected": error + 1 if bounded else None,
        "test_error_top5": 5.0,
        "seconds": (120.0 if bounded else 100.0) + 30 * seed,
        "hardware": "1 x abacus",
        "jax": "1.2.3",
        "commit": "0123456789abcdef",
    }
    config.run_dir.mkdir(parents=True)
    spread = [0.7, 1.0, 1.4] if bounded else [0.1, 1.0, 3.0]
    spectrum = {f"initial/conv{layer}/kernel": np.ones(3) for layer in (1, 2)}
    spectrum |= {f"final/conv{layer}/kernel": np.array(spread) for layer in (1, 2)}
    spectrum |= {"initial/head/kernel": np.ones(2), "final/head/kernel": np.array([0.9, 1.1])}
    np.savez(config.run_dir / "spectrum.npz", **spectrum)
    (config.run_dir / "config.json").write_text(json.dumps(asdict(config), default=str))
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (config.run_dir / "result.json").write_text(json.dumps(result))
    return config.run_dir


def write_table1(root: Path) -> None:
    for row, errors in ERRORS.items():
        for seed, error in enumerate(errors):
            write_run(root, table1.EXPERIMENT, row, seed, error)


@pytest.fixture
def runs(tmp_path):
    write_table1(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_table1(root)
    (only,) = report.chapters_of([table1.EXPERIMENT], record.collect(root / "none", root))
    return only


@pytest.fixture(scope="module")
def page_text(chapter):
    return report.to_html([chapter])


def cells(table: tables.Table, row: str) -> dict[str, str]:
    (found,) = [line for line in table.rows if line[0] == f"`{row}`"]
    return dict(zip(table.header, found, strict=True))


def test_spread_of_known_numbers():
    # Student's t for two degrees of freedom at 97.5 % is 4.30265.
    summary = comparison.spread([50.0, 52.0, 54.0])
    assert (summary.n, summary.mean, summary.std, summary.best) == (3, 52.0, 2.0, 50.0)
    assert summary.high - summary.mean == pytest.approx(4.30265 * 2 / 3**0.5, rel=1e-5)
    assert np.isnan(comparison.spread([1.0]).std)


def test_pairs_are_formed_by_seed_whatever_their_order():
    compared = comparison.paired({2: 47.0, 0: 45.0, 7: 0.0}, {0: 50.0, 2: 46.0, 5: 9.0})
    assert compared is not None
    assert (compared.n, compared.mean, compared.wins) == (2, -2.0, 1)
    assert comparison.paired({0: 1.0}, {1: 1.0}) is None


def test_table_has_paper_and_ours(chapter):
    table = tables.results_table(table1.EXPERIMENT, chapter.runs)
    sgd, svb = cells(table, "sgd"), cells(table, "svb")
    assert sgd["paper"] == "6.10 (6.22 ± 0.14)"
    assert sgd["test error %"] == "52.00 ± 2.00"
    assert svb["test error %"] == "**46.00 ± 1.00**"
    assert svb["95 % interval"] == "43.52 to 48.48"
    assert (sgd["best run"], svb["best run"]) == ("50.00", "45.00")
    assert svb["best epoch"] == "45.75"
    assert (sgd["after a last projection"], svb["after a last projection"]) == ("-", "47.00")
    assert svb["runs"] == "3"


def test_bold_rows_are_those_whose_paired_interval_excludes_zero(chapter):
    errors = {"sgd": (50.0, 52.0, 54.0), "svb": (49.0, 51.0, 53.5), "svb+bbn": (44.0, 51.0, 53.0)}
    runs = {row: with_errors(chapter.runs[row], values) for row, values in errors.items()}
    table = tables.results_table(table1.EXPERIMENT, runs)
    # SVB+BBN has the lowest mean, but its differences -6, -1, -1 do not rule out zero.
    assert cells(table, "svb+bbn")["test error %"] == "49.33 ± 4.73"
    assert cells(table, "svb")["test error %"] == "**51.17 ± 2.25**"
    assert cells(table, "sgd")["test error %"] == "52.00 ± 2.00"


def with_errors(records, errors) -> list[record.Record]:
    """The same runs with other final errors."""
    return [
        replace(
            run,
            result={**run.result, "test_error": error},
            metrics=[*run.metrics[:-1], {**run.metrics[-1], "test_error": error}],
        )
        for run, error in zip(records, errors, strict=True)
    ]


@pytest.fixture
def diverged(chapter):
    """SVB ends at 1e10 in one of three seeds, and at nothing that JSON can hold in another."""
    metric = replace(table1.EXPERIMENT.metric, limit=100.0)
    runs = {**chapter.runs, "svb": with_errors(chapter.runs["svb"], (1e10, None, 46.0))}
    return replace(chapter, experiment=replace(table1.EXPERIMENT, metric=metric), runs=runs)


def test_a_row_with_diverged_runs_has_no_mean_interval_or_difference(diverged):
    row = cells(tables.results_table(diverged.experiment, diverged.runs), "svb")
    assert row["test error %"] == "diverged (2 of 3)"
    assert (row["95 % interval"], row["difference, paired"], row["best run"]) == ("-", "-", "46.00")
    text = report.to_markdown([diverged])
    assert "00000" not in text
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_a_diverged_run_has_no_headline_and_no_say_in_the_axes(diverged):
    (card,) = report._cards(diverged)
    assert "svb+bbn against sgd" in card
    (axes,) = plots.curves(diverged.experiment, diverged.runs).axes
    assert axes.get_ylim()[1] < 60
    assert "svb (diverged)" in [line.get_label() for line in axes.lines]


def test_a_baseline_that_diverged_is_compared_with_nothing(chapter):
    runs = {**chapter.runs, "sgd": with_errors(chapter.runs["sgd"], (50.0, math.inf, 54.0))}
    table = tables.results_table(table1.EXPERIMENT, runs)
    assert cells(table, "svb")["difference, paired"] == "-"
    assert cells(table, "svb")["test error %"] == "46.00 ± 1.00"


def test_numbers_that_are_missing_print_as_a_dash(chapter):
    (first, *others) = chapter.runs["svb"]
    first = replace(first, result={**first.result, "best_test_error": math.nan})
    table = tables.results_table(table1.EXPERIMENT, {**chapter.runs, "svb": [first, *others]})
    assert cells(table, "svb")["best epoch"] == "-"


@pytest.mark.parametrize("std", [0.01, 0.5, 1.7, 40.0, 200.0])
def test_seeds_needed_are_the_fewest_that_make_the_interval_small_enough(std):
    n = comparison.seeds_needed(std, half_width=0.5)

    def half(n):
        return stats.t.ppf(0.975, n - 1) * std / n**0.5

    assert half(n) <= 0.5
    assert n == 2 or half(n - 1) > 0.5


@pytest.mark.timeout(20)
def test_seeds_needed_for_errors_that_make_no_sense_are_many():
    assert comparison.seeds_needed(1e18, half_width=0.5) == pytest.approx((1.96 * 1e18 / 0.5) ** 2, rel=0.01)


def test_report_says_what_is_open_and_what_would_decide_it(chapter):
    runs = {**chapter.runs, "svb": with_errors(chapter.runs["svb"], (50.5, 51.5, 54.0))}
    runs["svb+bbn"] = runs["svb+bbn"][:2]
    # Differences 0.5, -0.5 and 0 have standard deviation 0.5: 7 seeds.
    expected = (
        "Undecided, as their intervals include zero: `svb`. Seeds that an interval of ± 0.5 points would "
        "take, by the standard deviation of the paired differences so far: `svb` about 7 (0.50 over "
        "3 seeds). Too few seeds for an interval that says anything: `svb+bbn`."
    )
    assert tables.open_questions(table1.EXPERIMENT, runs) == expected
    assert expected in report.to_markdown([replace(chapter, runs=runs)])
    assert "<code>svb+bbn</code>." in report.to_html([replace(chapter, runs=runs)])
    assert tables.open_questions(table1.EXPERIMENT, chapter.runs) == ""


def test_table_compares_seed_by_seed_with_sgd(chapter):
    table = tables.results_table(table1.EXPERIMENT, chapter.runs)
    # Differences -5, -6, -7: mean -6, standard deviation 1.
    assert cells(table, "svb")["difference, paired"] == "-6.00 (-8.48 to -3.52); 3 of 3 better"
    assert cells(table, "sgd")["difference, paired"] == "-"
    assert cells(table, "svb")["quickest run (x baseline)"] == "2.0 min (1.20 x)"


def test_times_are_left_out_where_machines_were_shared(chapter):
    shared = replace(table1.EXPERIMENT, shows_times=False)
    table = tables.results_table(shared, chapter.runs)
    assert "quickest run (x baseline)" not in table.header
    assert {len(line) for line in table.rows} == {len(table.header)}


def test_times_are_left_out_of_smoke_tests_which_only_compile(chapter):
    smoke = {row: [replace(run, scale="smoke") for run in runs] for row, runs in chapter.runs.items()}
    table = tables.results_table(table1.EXPERIMENT, smoke)
    assert "quickest run (x baseline)" not in table.header
    assert {len(line) for line in table.rows} == {len(table.header)}


def test_markdown_has_scale_hardware_commit_and_warning(chapter):
    text = report.to_markdown([chapter])
    assert "table1, small" in text
    assert "1 x abacus; jax 1.2.3; commit 0123456789." in text
    assert report.SCALED_DOWN in text
    assert len(re.findall(r"^\| `", text, re.MULTILINE)) == 3


def test_prior_art_stands_under_its_table(tmp_path):
    write_run(tmp_path, table2.EXPERIMENT, "wrn-cifar10-sgd", 0, 30.0)
    chapters = report.chapters_of([table2.EXPERIMENT], record.collect(tmp_path / "none", tmp_path))
    assert "| ResNet of ResNet | 3.77 | 19.73 | - | 13.3M |" in report.to_markdown(chapters)
    assert "7 of 8 rows not run" in report.to_markdown(chapters)


REFERENCES = ("src", "href", "xlink:href", "srcset")


class References(HTMLParser):
    """Collects whatever a page would fetch, and checks that elements are closed in order."""

    VOID = ("meta", "path", "use", "image", "rect", "line", "circle", "br")

    def __init__(self):
        super().__init__()
        self.fetched, self.open = [], []

    def handle_starttag(self, tag, attrs):
        if tag != "a":
            self.fetched += [value for name, value in attrs if name in REFERENCES]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in REFERENCES]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_whole_and_fetches_nothing(page_text):
    page = References()
    page.feed(page_text)
    assert page.open == []
    assert all(reference.startswith(("#", "data:")) for reference in page.fetched)
    assert "@import" not in page_text
    assert "url(http" not in page_text
    assert page_text.count("<svg") == 3


def test_page_follows_light_and_dark(page_text):
    assert "prefers-color-scheme: dark" in page_text
    assert plots.INK not in page_text
    assert "currentColor" in page_text


def colours_of(experiment: Experiment, rows: list[str]) -> dict[str, str]:
    return {experiment.method(row): look["color"] for row, look in plots.looks(experiment, rows)}


def test_a_method_has_one_colour_in_all_figures():
    expected = {"sgd": plots.COLOURS["blue"], "svb": plots.COLOURS["red"], "svb+bbn": plots.INK}
    for experiment in catalogue.EXPERIMENTS.values():
        found = colours_of(experiment, list(experiment.rows))
        assert found.items() <= expected.items()


def test_the_papers_figure_1_has_the_colours_of_sgd_and_svb_exchanged():
    experiment = replace(figure1.EXPERIMENT, colours=figure1.EXPERIMENT.paper_colours)
    assert colours_of(experiment, ["sgd", "svb"]) == {
        "sgd": plots.COLOURS["red"],
        "svb": plots.COLOURS["blue"],
    }


def test_every_plot_of_singular_values_has_the_band(chapter):
    for draw in (plots.spectra, plots.sigma_range):
        for axes in draw(table1.EXPERIMENT, chapter.runs).axes:
            (band,) = [patch for patch in axes.patches if patch.get_label() == "band, ε = 0.5"]
            ends = band.get_bbox().intervalx if draw is plots.spectra else band.get_bbox().intervaly
            np.testing.assert_allclose(ends, [1 / 1.5, 1.5])


def test_curves_show_the_second_half_of_training(chapter):
    (axes,) = plots.curves(table1.EXPERIMENT, chapter.runs).axes
    # Last epochs have 44 to 54 %, the first ones 20 points more.
    low, high = axes.get_ylim()
    assert 42 < low < 44
    assert 54 < high < 56


def test_curves_show_all_of_a_short_training(chapter):
    short = {
        row: [replace(run, metrics=[run.metrics[0], {**run.metrics[-1], "epoch": 2}]) for run in runs]
        for row, runs in chapter.runs.items()
    }
    (axes,) = plots.curves(table1.EXPERIMENT, short).axes
    low, high = axes.get_ylim()
    assert 40 < low < 44
    assert 74 < high < 78


def test_no_two_rows_of_a_panel_look_alike():
    for experiment in catalogue.EXPERIMENTS.values():
        for rows in (experiment.panels or {"": list(experiment.rows)}).values():
            looks = [(look["color"], look["linestyle"]) for _, look in plots.looks(experiment, rows)]
            assert len(set(looks)) == len(rows)


def test_a_line_shows_under_another_that_runs_over_it():
    widths = [look["linewidth"] for _, look in plots.looks(table1.EXPERIMENT, ["sgd", "svb", "svb+bbn"])]
    assert widths == sorted(set(widths), reverse=True)


def test_a_page_has_contents_and_headlines_only_if_there_are_any(chapter, page_text):
    assert '<div class="cards">' in page_text
    assert "<nav>" not in page_text
    undecided = replace(chapter, runs={row: records[:1] for row, records in chapter.runs.items()})
    text = report.to_html([undecided, undecided])
    assert '<div class="cards">' not in text
    assert "<nav>" in text


def test_headlines_need_three_seeds(chapter):
    assert len(list(report._cards(chapter))) == 1
    fewer = {row: records[:2] for row, records in chapter.runs.items()}
    # Equal differences leave an interval without width, which excludes zero for two seeds as well.
    fewer["svb"] = with_errors(fewer["svb"], (45.0, 47.0))
    assert list(report._cards(replace(chapter, runs=fewer))) == []


def test_headlines_need_an_interval_that_excludes_zero(chapter):
    # Differences -6, -6, 0.5 and -4, -4, +1: better by several points on average, but not for certain.
    runs = {
        "sgd": chapter.runs["sgd"],
        "svb": with_errors(chapter.runs["svb"], (44.0, 46.0, 54.5)),
        "svb+bbn": with_errors(chapter.runs["svb+bbn"], (46.0, 48.0, 55.0)),
    }
    assert list(report._cards(replace(chapter, runs=runs))) == []


def test_headlines_have_the_largest_harm_beside_the_largest_improvement(chapter):
    runs = {**chapter.runs, "svb+bbn": with_errors(chapter.runs["svb+bbn"], (53.0, 55.0, 57.5))}
    better, worse = report._cards(replace(chapter, runs=runs))
    assert "-6.00 points" in better
    assert "+3.17 points" in worse


def test_histogram_panel_draws_the_shares_of_its_layers(chapter):
    figure = plots.spectra(table1.EXPERIMENT, chapter.runs)
    lower = figure.axes[0]
    (stairs,) = [patch for patch in lower.patches if patch.get_label() == "sgd"]
    shares, edges, _ = stairs.get_data()
    # One layer of three values in each of three seeds: 0.1, 1 and 3, a third of all each.
    filled = [(low, high) for share, low, high in zip(shares, edges, edges[1:], strict=False) if share]
    assert [share for share in shares if share] == pytest.approx([1 / 3] * 3)
    assert all(low <= value < high for value, (low, high) in zip((0.1, 1.0, 3.0), filled, strict=True))


def test_histograms_end_where_their_values_and_the_band_do():
    looks = {"svb": {"color": "red"}, "sgd": {"color": "blue"}}
    axes = plots.new_figure(1, 1)[1][0, 0]
    # SVB's largest value is 1.549; 1.5 itself is in the bin from 1.50 to 1.52.
    histograms = {
        name: record.histogram(np.array(values))
        for name, values in (("svb", [1 / 1.5, 1.0, 1.5, 1.549]), ("sgd", [0.3, 1.0, 3.0]))
    }
    plots.draw_histograms(axes, histograms, looks, [(1 / 1.5, 1.5)])
    edges = {patch.get_label(): patch.get_data().edges for patch in axes.patches}
    assert edges["svb"][[0, -1]] == pytest.approx([0.66, 1.56])
    assert edges["sgd"][[0, -1]] == pytest.approx([0.30, 3.02])
    assert all(np.isclose(edges["sgd"], end).any() for end in (0.66, 1.52))


def test_sigma_panel_draws_what_was_logged_and_the_ends_where_nothing_was(chapter):
    (panel,) = plots.sigma_range(table1.EXPERIMENT, chapter.runs).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
    assert lines["svb"] == [[0, 1.01], *([epoch, 0.5] for epoch in range(1, 7))]
    assert lines["sgd"][1] == pytest.approx([6, 0.11])


def test_sigma_panel_draws_what_an_epoch_without_projection_measured(chapter):
    run = chapter.runs["svb"][0]
    run = dataclasses.replace(run, metrics=[*run.metrics[:-1], {**run.metrics[-1], "sigma_min": 0.25}])
    assert plots.sigma_curve(run, "min") == ([*range(7)], [1.01, *[0.5] * 5, 0.25])


def test_records_survive_saving_and_stand_in_for_their_runs(runs, tmp_path):
    results = tmp_path / "results"
    run_dir = runs / "table1/svb/small/seed1"
    kept = record.read_run(run_dir)
    assert kept.metrics[0]["learning_rate"] == 0.123457
    assert list(kept.spectra["final"]) == ["conv1/kernel", "conv2/kernel", "head/kernel"]
    path = record.save(kept, results)
    assert path == results / "table1/svb/small/seed1.json"
    assert record.load(path) == kept
    assert path.stat().st_size < 10_000
    assert len(record.collect(results, runs)) == 9
    assert len(record.collect(results, tmp_path / "none")) == 1


def test_a_resumed_run_counts_each_epoch_once(runs):
    run_dir = runs / "table1/svb/small/seed0"
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join([lines[0], *lines]) + "\n")
    assert [entry["epoch"] for entry in record.read_run(run_dir).metrics] == [*range(1, 7)]


def test_unfinished_runs_are_left_out(runs, tmp_path):
    (runs / "table1/svb/small/seed0/result.json").unlink()
    assert len(record.collect(tmp_path / "results", runs)) == 8
    with pytest.raises(FileNotFoundError, match="finished run"):
        record.read_run(runs / "table1/svb/small/seed0")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b""),
        ("result.json", b'{"test_error": 5'),
        ("result.json", b"{}"),
        ("result.json", b"null"),
        ("metrics.jsonl", b"\xff\xfe"),
        ("metrics.jsonl", b"3\n"),
        ("metrics.jsonl", b"{}\n"),
        ("config.json", b"[1"),
        ("result.json", b'{"seconds": 1' + b"0" * 400 + b"}"),
        ("spectrum.npz", b"PK"),
        ("spectrum.npz", os.mkdir),
        ("metrics.jsonl", os.mkdir),
        # Would never end.
        ("metrics.jsonl", os.mkfifo),
    ],
)
def test_damaged_runs_are_named_and_left_out(name, content, runs, tmp_path, capsys):
    file = runs / "table1/svb/small/seed0" / name
    file.unlink()
    content(file) if callable(content) else file.write_bytes(content)
    with pytest.raises(record.DamagedRunError, match=r"The run in \S+seed0 is damaged \("):
        record.read_run(file.parent)
    assert len(record.collect(tmp_path / "results", runs)) == 8
    assert "Left out: The run in" in capsys.readouterr().err


def test_an_altered_run_is_noticed_by_its_sums(runs):
    run_dir = runs / "table1/svb/small/seed0"
    write_sums(run_dir, {name: (run_dir / name).read_bytes() for name in RUN_FILES})
    record.read_run(run_dir)
    metrics = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(metrics.replace('"epoch": 1', '"epoch": 9'))
    with pytest.raises(record.DamagedRunError, match=r"metrics\.jsonl in \S+seed0 is damaged"):
        record.read_run(run_dir)


HOSTILE = "<script>alert(1)</script>"


def test_page_escapes_every_string_that_it_did_not_write(runs):
    for run_dir in runs.glob("table1/*/small/seed*"):
        result = json.loads((run_dir / "result.json").read_text())
        hostile = {"hardware": HOSTILE, "jax": HOSTILE, "commit": HOSTILE[:10], "data_origin": HOSTILE}
        (run_dir / "result.json").write_text(json.dumps({**result, **hostile}))
        spectrum = dict(np.load(run_dir / "spectrum.npz"))
        spectrum |= {f"{when}/{HOSTILE}/kernel": np.ones(3) for when in ("initial", "final")}
        np.savez(run_dir / "spectrum.npz", **spectrum)
    rows = {f"{HOSTILE}{row}": config for row, config in table1.EXPERIMENT.rows.items()}
    named = dataclasses.replace(
        table1.EXPERIMENT,
        rows=rows,
        title=HOSTILE,
        notes=(HOSTILE, f"`{HOSTILE}`"),
        smoke_row=next(iter(rows)),
    )
    records = [
        dataclasses.replace(entry, row=HOSTILE + entry.row) for entry in record.collect(runs / "none", runs)
    ]
    page = report.to_html(report.chapters_of([named], records), title=HOSTILE)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 5


def test_what_the_small_scale_changes_is_noted_at_that_scale_alone(tmp_path):
    for scale in ("small", "smoke"):
        write_run(tmp_path, table1.EXPERIMENT, "svb", 0, 10.0, scale=scale)
    chapters = report.chapters_of([table1.EXPERIMENT], record.collect(tmp_path / "none", tmp_path))
    text = {chapter.scale: report.to_markdown([chapter]) for chapter in chapters}
    assert ("- Small scale: 20 layers" in text["small"], report.SMOKE in text["small"]) == (True, False)
    assert ("Small scale" in text["smoke"], report.SMOKE in text["smoke"]) == (False, True)
    assert report.SCALED_DOWN not in text["smoke"]


def _change(**fields):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _replace(make):
    def damage(path):
        path.unlink()
        make(path)

    return damage


@pytest.mark.parametrize("rows", [["svb"], ["sgd", "svb", "svb+bbn"]])
def test_networks_that_ended_without_finite_weights_are_reported(rows, runs, tmp_path):
    for row in rows:
        for run_dir in runs.glob(f"table1/{row}/small/seed*"):
            spectrum = dict(np.load(run_dir / "spectrum.npz"))
            spectrum |= {name: np.full(3, math.nan) for name in spectrum if name.startswith("final/")}
            np.savez(run_dir / "spectrum.npz", **spectrum)
            lines = [{"epoch": epoch, "test_error": 90.0} for epoch in (1, 2)]
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chapter,) = report.chapters_of([table1.EXPERIMENT], record.collect(tmp_path / "none", runs))
    assert chapter.runs["svb"][0].spectra["final"]["head/kernel"] == {}
    page = report.to_html([chapter])
    assert page.count("<svg") == 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text('{"experiment": "table1"'), "delimiter"),
        (lambda path: path.write_bytes(b"\xff"), "decode"),
        (lambda path: path.write_text("[" * 100_000), "recursion"),
        (_change(result=None), "its result is no dict"),
        (_change(metrics=3), "its metrics is no list"),
        (_change(metrics=[]), "its metrics are not numbers by epoch"),
        (_change(metrics=[{"step": 1}]), "its metrics are not numbers by epoch"),
        (_change(metrics=[{"epoch": []}]), "its metrics are not numbers by epoch"),
        (_change(metrics=[{"epoch": math.inf}]), "its metrics are not numbers by epoch"),
        (_change(metrics=[{"epoch": 1, "test_error": "5"}]), "its metrics are not numbers by epoch"),
        (_change(metrics=[{"epoch": 1, "test_error": 10**400}]), "its metrics are not numbers by epoch"),
        (_change(result={}), "its result has no seconds"),
        (_change(result={"seconds": -1.0}), "its result has no seconds"),
        (
            _change(result={"seconds": 1.0, "sigma": [[1.0], ["2"]]}),
            "its result's sigma is neither text nor num",
        ),
        (_change(result={"seconds": 1.0, "steps": {}}), "its result's steps is neither text nor numbers"),
        (_change(spectra={"initial": {}, "final": {}}), "its spectra are not counts"),
        (
            _change(spectra={"initial": {"w": {"50": 3}}, "final": {"w": {"50": "3"}}}),
            "its spectra are not count",
        ),
        (
            _change(spectra={"initial": {"w": {"50": 3}}, "final": {"w": {"-5": 3}}}),
            "its spectra are not counts",
        ),
        (
            _change(spectra={"initial": {"w": {"50": 3}}, "final": {"w": {"50": -3}}}),
            "its spectra are not counts",
        ),
        (_change(spectra={}), "its spectra are not initial and final"),
        (_change(seed="0"), "its seed is no int"),
        (_change(seed=1), "it is that of table1/svb/small/seed1.json"),
        (_replace(Path.mkdir), "Not a regular file"),
        # These would never end.
        (_replace(os.mkfifo), "Not a regular file"),
        (_replace(lambda path: path.symlink_to("/dev/zero")), "Not a regular file"),
    ],
)
@pytest.mark.timeout(60)
def test_a_damaged_record_is_named(damage, reason, runs, tmp_path, capsys):
    results = tmp_path / "results"
    path = record.save(record.read_run(runs / "table1/svb/small/seed0"), results)
    damage(path)
    assert main(["report", "--runs", str(runs), "--results", str(results), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"load needs the record of a run, got {path}: "), said
    assert reason in said


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({}, "test_error"),
        ({"test_error": "5"}, "test_error"),
        ({"test_error": 5.0, "best_test_error": "5"}, "best_test_error"),
    ],
)
def test_a_result_without_the_error_it_is_judged_by_is_named(more, key, runs, tmp_path, capsys):
    (runs / "table1/svb/small/seed0/result.json").write_text(json.dumps({"seconds": 1.0, **more}))
    assert main(["report", "--runs", str(runs), "--results", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"report needs {key} in every result of table1, got none in svb, small, seed 0.\n"
    )


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_a_report_that_dies_while_it_writes_leaves_the_old_one(name, chapter, tmp_path, monkeypatch):
    report.write([chapter], tmp_path, title="old")
    old = (tmp_path / name).read_text()

    def die(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        report.write([chapter], tmp_path, title="new")
    assert (tmp_path / name).read_text() == old


def test_report_writes_page_tables_and_pictures(runs, tmp_path, capsys):
    out = tmp_path / "out"
    for row in ("svb", "svb+bbn"):
        shutil.rmtree(runs / "table1" / row)
    tables_file = out / "docs" / "results.md"
    tables_file.parent.mkdir(parents=True)
    report.Report(
        out=out, runs=runs, results=tmp_path / "none", figures=out / "figures", tables=tables_file
    ).run()
    assert str(out / "report.html") in capsys.readouterr().out
    assert (out / "report.md").read_text().startswith(f"# {report.TITLE}")
    assert report.PAPER_ADDRESS in (out / "report.html").read_text()
    pictures = sorted(path.name for path in (out / "figures").iterdir())
    assert pictures == [f"table1-small-{what}.png" for what in ("curves", "sigma-range", "spectra")]
    linked = re.findall(r"^!\[[^]]+\]\((.*)\)$", tables_file.read_text(), re.MULTILINE)
    assert sorted(linked) == [f"../figures/{name}" for name in pictures]


ROOT = Path(__file__).parents[1]


def recorded(experiment: Experiment, scale: str) -> report.Chapter:
    """The committed records of an experiment."""
    chapters = report.chapters_of([experiment], record.collect(ROOT / "experiments/results", ROOT / "none"))
    (found,) = [chapter for chapter in chapters if chapter.scale == scale]
    return found


def test_readme_has_the_numbers_of_the_records():
    runs = recorded(convergence.EXPERIMENT, "medium").runs
    full = tables.results_table(convergence.EXPERIMENT, runs)
    shown = ["test error %", "train error", "difference, paired", "runs"]
    header = ["row", "first rate", "test error %, mean ± std", "train error %"]
    header += ["minus `sgd`, paired (95 % interval)", "n"]
    rates = {row: f"{config.learning_rate:g}" for row, config in convergence.ROWS.items()}
    lines = [[f"`{row}`", rates[row], *(cells(full, row)[name] for name in shown)] for row in runs]
    expected = tables.Table(header, lines).to_markdown()
    readme = (ROOT / "README.md").read_text()
    assert expected in readme, f"README.md needs this table:\n{expected}"


def test_readme_says_what_longer_training_comes_to():
    full = tables.results_table(convergence.EXPERIMENT, recorded(convergence.EXPERIMENT, "long").runs)
    sgd, svb = (cells(full, row) for row in ("sgd", "svb-0.05"))
    expected = (
        f"After 40 epochs (`--scale long`, n = {svb['runs']}): {sgd['test error %']} % with `sgd`, "
        f"{svb['test error %']} % with `svb-0.05`, {svb['difference, paired']}."
    )
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert expected in readme, f"README.md needs this sentence:\n{expected}"


def test_readme_calls_undecided_what_the_records_leave_open():
    runs = recorded(convergence.EXPERIMENT, "medium").runs
    compared = [tables.compare(convergence.EXPERIMENT, runs, row) for row in ("svb", "svb+bbn")]
    are_undecided = not any(found and found.is_decided for found in compared)
    readme = (ROOT / "README.md").read_text()
    assert ("The intervals of SVB and of SVB+BBN include zero." in readme) == are_undecided


def test_results_page_is_the_report_of_the_records():
    chapters = report.chapters_of(
        list(catalogue.EXPERIMENTS.values()), record.collect(ROOT / "experiments/results", ROOT / "none")
    )
    text = report.to_markdown(chapters, figures="../experiments/results/figures")
    command = "svb report --tables docs/results.md --figures experiments/results/figures"
    assert (ROOT / "docs/results.md").read_text() == text, f"out of date; renew it with: {command}"
    pictures = re.findall(r"\(\.\./(experiments\S+\.png)\)", text)
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_report_without_runs_says_how_to_get_some(tmp_path):
    with pytest.raises(FileNotFoundError, match="run table1 --scale smoke"):
        report.Report(runs=tmp_path, results=tmp_path).run()
