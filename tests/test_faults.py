"""The attacks of tests/faults in short; ``python -m tests.faults --help`` has the long ones."""

import time

import pytest

from svb_jax.experiments import record, report, table1
from tests.faults.disk import can_mount, survive_a_full_disk, survive_full_disks
from tests.faults.flips import survive_flips
from tests.faults.kill import survive_kills
from tests.faults.soak import check_flat, many_runs, soak
from tests.faults.tally import Tally, to_table
from tests.test_report import write_run


def test_a_tally_counts_and_complains():
    tally = Tally("an attack")
    tally.add("first", lambda: "survived")
    tally.check()
    tally.add("second", lambda: 1 // 0)
    assert to_table([tally]).splitlines()[-1] == "| an attack | 2 | 1 | 0 | 1 | 0 |"
    with pytest.raises(AssertionError, match="trial 2, second: ZeroDivisionError"):
        tally.check()


def test_killed_runs_go_on_bit_for_bit(tmp_path):
    survive_kills(tmp_path, kills=2).check()


def test_flipped_bits_change_nothing_unseen(tmp_path):
    survive_flips(tmp_path, trials=5).check()


def test_a_flipped_bit_that_stops_a_run_can_be_mended(tmp_path):
    # Drawn for an unfinished run, which needs its data.
    tally = survive_flips(tmp_path, trials=1, seed=0, name="imported.json")
    tally.check()
    assert tally.counts["noticed"] == 1


@pytest.mark.skipif(not can_mount(), reason="a small file system needs root")
def test_a_full_file_system_is_survived(tmp_path):
    survive_full_disks(tmp_path, trials=1).check()


def test_ten_thousand_epochs_are_reported_in_seconds(tmp_path):
    run_dir = write_run(tmp_path, table1.EXPERIMENT, "svb", 0, 40.0)
    line = (run_dir / "metrics.jsonl").read_text().splitlines()[0]
    lines = (line.replace('"epoch": 1', f'"epoch": {epoch}') for epoch in range(1, 10_001))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    begin = time.process_time()
    (chapter,) = report.chapters_of([table1.EXPERIMENT], record.collect(tmp_path / "none", tmp_path))
    assert len(chapter.records[0].metrics) == 10_000
    report.write([chapter], tmp_path / "out")
    assert time.process_time() - begin < 30


def test_a_short_soak_is_flat(tmp_path):
    series = soak(tmp_path, epochs=40)
    assert len(series) == 10
    # A save under way has a few threads and files of its own; one left behind by each would make twenty.
    for early, late in ((series[4].threads, series[-1].threads), (series[4].files, series[-1].files)):
        assert late <= early + 10, series


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_epochs_are_flat(tmp_path):
    check_flat(soak(tmp_path, epochs=2000))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_runs_are_flat(tmp_path):
    check_flat(many_runs(tmp_path, runs=200))


@pytest.mark.slow
def test_a_full_disk_is_survived(tmp_path):
    survive_a_full_disk(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_kills_leave_no_trace(tmp_path):
    survive_kills(tmp_path, kills=10, seed=1).check()
