"""Two processes as two hosts: what is lost with one of them, and how the other notices."""

import atexit
import socket
from pathlib import Path

import jax
import numpy as np
import pytest

from svb_jax.training import Diverged, agreement
from svb_jax.training.agreement import agree_on_the_data, agree_on_the_end
from svb_jax.training.hosts import Hosts, LostHost, leaving_on_failure
from tests.faults.hosts import (
    finish_two_in_peace,
    stop_with_a_frozen_host,
    stop_with_a_host_that_cannot_start,
    survive_a_full_disk,
    survive_a_killed_host,
    two_hosts,
)
from tests.faults.processes import Forked
from tests.faults.runs import QUICK_OPTIONS, wait_until


def test_a_killed_host_of_a_quick_run_stops_the_other_and_both_go_on(tmp_path):
    survive_a_killed_host(finish_two_in_peace(tmp_path, **QUICK_OPTIONS), victim=1, **QUICK_OPTIONS)


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


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_lost_connection_is_explained(farewells, kind):
    lost = kind("UNKNOWN: Gloo all-reduce failed: Connection reset by peer\nmore")
    explained = pytest.raises(LostHost, match=r"stopped \(UNKNOWN: .* by peer\)\. .* Start all hosts again")
    with explained, leaving_on_failure():
        raise lost
    assert farewells == [1]


def test_a_lost_connection_is_explained_once_however_many_steps_were_under_way(farewells):
    lost = jax.errors.JaxRuntimeError(
        f"INTERNAL: {'Error dispatching computation: ' * 17}Gloo all-reduce failed"
    )
    explained = pytest.raises(LostHost, match=r"stopped \(INTERNAL: Gloo all-reduce failed\)\. ")
    with explained, leaving_on_failure():
        raise lost


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_another_failure_of_jax_stays_itself(farewells, kind):
    with pytest.raises(kind, match="out of memory"), leaving_on_failure():
        raise kind("RESOURCE_EXHAUSTED: out of memory")


def test_addresses_and_cluster_exclude_each_other():
    with pytest.raises(ValueError, match="got both"):
        Hosts(coordinator="10.0.0.1:1234", num_processes=2, process_id=0, cluster=True)


@pytest.mark.parametrize(
    ("options", "need"),
    [
        ({"coordinator": "10.0.0.1"}, "a coordinator of the form HOST:PORT, got '10.0.0.1'"),
        ({"coordinator": "10.0.0.1:70000"}, "a coordinator of the form HOST:PORT"),
        ({"coordinator_bind": ":80"}, "a coordinator_bind of the form HOST:PORT"),
        ({"process_id": 2}, "a process_id from 0 to num_processes - 1, got 2 of 2"),
        ({"wait_seconds": 0}, "wait_seconds of at least 1 and at most 10000000, got 0"),
        ({"wait_seconds": 2**40}, "wait_seconds of at least 1 and at most 10000000, got 1099511627776"),
        ({"num_processes": 2**40}, "num_processes of at most 1000000, got 1099511627776"),
    ],
)
def test_impossible_hosts_are_refused(options, need):
    possible = {"coordinator": "10.0.0.1:1234", "num_processes": 2, "process_id": 0}
    with pytest.raises(ValueError, match=f"Hosts needs {need}"):
        Hosts(**{**possible, **options})


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_that_is_started_alone_gives_up_with_a_sentence(number, tmp_path):
    host = two_hosts()[number]
    code, output = Forked(tmp_path / "run", **QUICK_OPTIONS, **host, wait_seconds=2).end(timeout=120)
    assert code == 1, output
    assert output == (
        f"Waited 2 s for 2 hosts at {host['coordinator']} in vain. Start all of them, with the same "
        "coordinator; --wait-seconds waits longer.\n"
    )


def test_a_coordinator_whose_port_is_taken_gets_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        first = {"coordinator": address, "num_processes": 2, "process_id": 0, "wait_seconds": 2}
        code, output = Forked(tmp_path / "run", **QUICK_OPTIONS, **first).end(timeout=120)
    assert code == 1, output
    assert output == (
        f"The first host cannot listen at {address} (Address already in use). Give all hosts another "
        "coordinator, or this one an address of its own by --coordinator-bind.\n"
    )


def test_hosts_with_other_configurations_do_not_start(tmp_path):
    processes = [
        Forked(
            tmp_path / "run", tmp_path / f"{seed}.log", **QUICK_OPTIONS, **host, seed=seed, momentum=momentum
        )
        for host, seed, momentum in zip(two_hosts(), (0, 1), (0.9, 0.5), strict=True)
    ]
    for process in processes:
        code, output = process.end(timeout=120)
        assert code == 2, output
        assert "host 1 has momentum=0.5, not 0.9, seed=1, not 0 as host 0 has" in output
    assert not (tmp_path / "run").exists()


def test_hosts_of_which_one_finds_the_run_complete_do_not_start(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "gather", lambda own: [own, False])
    agree_on_the_end(tmp_path, is_complete=False)
    refused = r"needs a run_dir that all hosts see: host 0 finds a complete run in .*, host 1 does not"
    with pytest.raises(ValueError, match=refused):
        agree_on_the_end(tmp_path, is_complete=True)


def test_hosts_with_other_data_do_not_start(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "gather", lambda own: ["a", own])
    agree_on_the_data("digits", "a")
    with pytest.raises(ValueError, match="host 1 has other images or labels of digits than host 0"):
        agree_on_the_data("digits", "b")


def test_the_partner_of_a_frozen_host_stops_with_a_sentence(tmp_path):
    assert stop_with_a_frozen_host(tmp_path, frozen=1, **{**QUICK_OPTIONS, "epochs": 2000}) < 30


def test_the_coordinator_listens_where_it_was_told_to(tmp_path):
    first, _ = two_hosts()
    port = int(first["coordinator"].rpartition(":")[2])
    process = Forked(tmp_path / "run", **QUICK_OPTIONS, **first, wait_seconds=4)
    try:
        wait_until(lambda: listeners(port) or process.poll() is not None, timeout=60)
        (address,) = listeners(port)
        # Little-endian hexadecimal, as the kernel writes 127.0.0.1, perhaps mapped into IPv6.
        assert address.endswith("0100007F")
    finally:
        process.kill()


def listeners(port: int) -> set[str]:
    """Return the local addresses that someone listens at on this port, as in /proc/net/tcp."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, number = local.split(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address)
    return found
