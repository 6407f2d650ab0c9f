"""Under which address the nodes of one job call each other."""

from __future__ import annotations

from penstock_server.services.addresses import Site, addresses, endpoint


def test_one_node_is_the_loopback_whatever_it_says() -> None:
    assert addresses([Site("a", "host-a", "10.0.0.1")]) == {"a": "127.0.0.1"}


def test_nodes_on_one_machine_use_their_loopback_addresses() -> None:
    sites = [Site("a", "h", "127.0.0.1"), Site("b", "h", "127.0.0.1")]
    assert addresses(sites) == {"a": "127.0.0.1", "b": "127.0.0.1"}


def test_node_beside_the_server_is_called_by_name_from_elsewhere() -> None:
    sites = [Site("a", "head", "127.0.0.1"), Site("b", "far", "10.0.0.2")]
    assert addresses(sites) == {"a": "head", "b": "10.0.0.2"}


def test_node_that_says_nothing_is_called_by_name() -> None:
    assert addresses([Site("a", "head", ""), Site("b", "far", "10.0.0.2")])["a"] == "head"


def test_six_is_put_in_brackets() -> None:
    assert (endpoint("fe80::1", 7), endpoint("10.0.0.2", 7)) == ("[fe80::1]:7", "10.0.0.2:7")
