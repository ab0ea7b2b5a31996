"""Two processes as two hosts: what is lost with one of them, and how the other notices."""

import atexit

import jax
import numpy as np
import pytest

from svb_jax.training import Diverged
from svb_jax.training.hosts import Hosts, LostHost, leaving_on_failure
from tests.faults.hosts import (
    finish_two_in_peace,
    stop_with_a_host_that_cannot_start,
    survive_a_full_disk,
    survive_a_killed_host,
)

# No BatchNorm, no bounds, no convolution: a step that compiles in no time.
QUICK = {
    "model": "deep_linear",
    "depth": 2,
    "epochs": 4,
    "learning_rate": 1e-5,
    "final_learning_rate": 1e-6,
    "learning_rate_stages": 2,
    "svb_epsilon": None,
    "bbn_epsilon": None,
}


def test_a_killed_host_of_a_quick_run_stops_the_other_and_both_go_on(tmp_path):
    survive_a_killed_host(finish_two_in_peace(tmp_path, **QUICK), victim=1, **QUICK)


@pytest.fixture(scope="module")
def peace(tmp_path_factory):
    """A run of two processes that nothing happens to."""
    return finish_two_in_peace(tmp_path_factory.mktemp("hosts"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_host_stops_the_other_and_both_go_on_bit_for_bit(peace, victim):
    survive_a_killed_host(peace, victim)


@pytest.mark.slow
def test_a_host_without_room_stops_the_other_and_both_go_on_bit_for_bit(peace):
    survive_a_full_disk(peace)


@pytest.mark.slow
def test_a_host_that_cannot_start_stops_the_other(tmp_path):
    stop_with_a_host_that_cannot_start(tmp_path)


@pytest.fixture
def farewells(monkeypatch):
    """The exit codes that this host, one of two, would leave with."""
    codes = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(atexit, "register", lambda leave, code: codes.append(code))
    return codes


def _fill_the_disk():
    raise OSError("no room")


def _fail_in_a_library():
    np.reshape(np.zeros(3), 2)


def _ask_for_too_little():
    Hosts(coordinator="10.0.0.1:1234")


@pytest.mark.parametrize(
    ("fail", "code"), [(_fill_the_disk, 1), (_fail_in_a_library, 1), (_ask_for_too_little, 2)]
)
def test_a_host_that_fails_does_not_wait_for_the_others(farewells, fail, code):
    with pytest.raises((OSError, ValueError)), leaving_on_failure(Diverged):
        fail()
    assert farewells == [code]


def test_hosts_that_fail_together_wait_for_each_other(farewells):
    with pytest.raises(Diverged), leaving_on_failure(Diverged):
        raise Diverged("The loss is nan at step 3")
    assert farewells == []


def test_a_lost_connection_is_explained(farewells):
    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer\nmore")
    explained = pytest.raises(LostHost, match=r"stopped \(UNKNOWN: .* by peer\)\. .* Start all hosts again")
    with explained, leaving_on_failure():
        raise lost
    assert farewells == [1]


def test_another_failure_of_jax_stays_itself(farewells):
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"), leaving_on_failure():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_addresses_and_cluster_exclude_each_other():
    with pytest.raises(ValueError, match="got both"):
        Hosts(coordinator="10.0.0.1:1234", num_processes=2, process_id=0, cluster=True)
