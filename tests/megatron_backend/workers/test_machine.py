"""What a rank finds out about its machine."""

import os
import socket

import psutil
import pytest

from megatron_backend.workers.machine import (
    GLOO_INTERFACE,
    Neighbourhood,
    RankNetwork,
    interface_towards,
    threads,
)


def outer_address() -> str:
    """An address of this machine that is not the loopback's."""
    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family is socket.AF_INET and not found.address.startswith("127."):
                return found.address
    pytest.skip("this machine has no network but the loopback")


def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.name.invalid") is None


def test_the_interface_to_other_machines_is_not_the_loopback() -> None:
    others = outer_address().rpartition(".")[0] + ".254"
    interface = interface_towards(others)
    assert interface is not None
    assert interface != "lo"


def test_gloo_is_told_the_interface_anew_when_ranks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    network = RankNetwork()
    network.face([])
    assert os.environ[GLOO_INTERFACE] == "lo"
    network.face(["no.such.name.invalid"])
    assert GLOO_INTERFACE not in os.environ  # gloo's own guess
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)


def test_an_operators_word_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "ib0")
    RankNetwork().face([])
    assert os.environ[GLOO_INTERFACE] == "ib0"


@pytest.mark.parametrize(
    ("cores", "cpus", "ranks", "expected"), [(8, 100, 2, 4), (64, 6, 2, 3), (2, 2, 5, 1)]
)
def test_ranks_share_the_cores(
    cores: int, cpus: int, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads(Neighbourhood(ranks=ranks, cpus=cpus, peers=())) == expected
