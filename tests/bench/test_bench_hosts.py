"""Emulated hosts: their layout, who runs where, and what `bench pserver --hosts` reports. Nothing is started."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from bench.hosts.grid import MINE, PEERS, Entry, Turns, add_figures, entries_of, names_of, sizes_of
from bench.peers.cluster import Cluster, Host
from bench.peers.race import Results
from bench.report import Report
from tools.hosts.layout import LINKS, Layout, LinkShape, Owner, abandoned, bytes_to_hosts, owner_of

OWNER = Owner(12, 3456)


def lines(commands: list[tuple[str, ...]]) -> list[str]:
    return [shlex.join(command) for command in commands]


def test_everything_is_made_within_namespaces_of_the_owner() -> None:
    layout = Layout(OWNER, 2)
    made = lines(layout.create())
    assert layout.hosts == ["penstock-hosts-12-3456-host0", "penstock-hosts-12-3456-host1"]
    assert all(
        line.startswith(("ip netns add penstock-hosts-12-3456-", "ip -n penstock-hosts-12-3456-")) for line in made
    )
    assert "ip -n penstock-hosts-12-3456-host1 addr add 10.83.0.2/24 dev eth0" in made
    assert len({layout.address(host) for host in range(2)}) == 2


def test_all_that_was_made_is_removed() -> None:
    layout = Layout(OWNER, 3)
    made = {command[-1] for command in layout.create() if command[:3] == ("ip", "netns", "add")}
    assert {command[-1] for command in layout.remove()} == made == {*layout.hosts, layout.bridge}


@pytest.mark.parametrize("num_hosts", [0, 201])
def test_a_layout_has_addresses_for_all_hosts(num_hosts: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 200"):
        Layout(OWNER, num_hosts)


def test_both_ends_of_a_link_have_its_rate() -> None:
    shaped = lines(Layout(OWNER, 2).shape(LINKS["1gbit"], delays=False))
    ends = [line for line in shaped if "tbf rate 1000mbit" in line]
    assert [line.split()[2].rpartition("-")[2] for line in ends] == ["host0", "bridge", "host1", "bridge"]
    assert [line.split()[6] for line in ends] == ["eth0", "port0", "eth0", "port1"]
    assert not any("netem" in line for line in shaped)


def test_a_delay_is_added_once_on_the_way_between_hosts() -> None:
    shaped = lines(Layout(OWNER, 2).shape(LinkShape("slow", 10, 700), delays=True))
    delayed = [line for line in shaped if "netem delay 700us" in line]
    assert len(delayed) == 2
    assert all("-host" in line for line in delayed)
    assert len([line for line in shaped if "tbf rate 10mbit" in line]) == 4


def test_namespaces_of_running_processes_are_not_abandoned() -> None:
    mine, dead = Layout(OWNER, 1), Layout(Owner(12, 99), 1)  # the number of a process was given again
    others = ["web", "penstock-hosts-web", "penstock-hosts-1-x-host0", "xpenstock-hosts-1-2-host0"]
    names = [*mine.hosts, mine.bridge, *dead.hosts, dead.bridge, *others]
    assert abandoned(names, {OWNER}) == [*dead.hosts, dead.bridge]
    assert [owner_of(name) for name in others] == [None] * 4


def test_bytes_are_those_that_left_towards_each_host() -> None:
    found = [
        {"kind": "noqueue", "dev": "lo", "root": True, "bytes": 1},
        {"kind": "tbf", "dev": "port1", "root": True, "bytes": 20},
        {"kind": "tbf", "dev": "port0", "root": True, "bytes": 10},
        {"kind": "pfifo", "dev": "port0", "parent": "1:", "bytes": 5},
    ]
    assert bytes_to_hosts(json.dumps(found), 2) == [10, 20]


def test_sizes_are_read_as_servers_and_trainers() -> None:
    assert sizes_of("1+1,2+4") == [(1, 1), (2, 4)]
    for wrong in ("2", "2+", "0+1", "a+b", "1+2+3"):
        with pytest.raises(SystemExit, match=r"expected servers\+trainers"):
            sizes_of(wrong)


def test_an_unknown_mode_or_link_is_named() -> None:
    assert names_of("sync,sync", ["sync", "async"], "--modes") == ["sync"]
    with pytest.raises(SystemExit, match="--links has 5gbit; expected 1gbit, 10gbit, 100mbit"):
        names_of("1gbit,5gbit", list(LINKS), "--links")


def test_peers_take_part_in_one_size() -> None:
    assert entries_of((2, 2), ["sync"], list(PEERS)) == [
        Entry(MINE, "sync"), Entry("torch_rpc_hosts", "sync"), Entry("paddle_brpc_hosts", "async"),
    ]  # fmt: skip
    assert entries_of((1, 2), ["sync", "async"], list(PEERS)) == [Entry(MINE, "sync"), Entry(MINE, "async")]


def test_a_cluster_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    hosts = [Host(("ip", "netns", "exec", f"h{n}"), f"10.0.0.{n}") for n in range(3)]
    made = Cluster("penstock_hosts", tuple(hosts[:1]), tuple(hosts[1:]), True, 6170, (0, 1), "eth0")
    made.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == made
    assert made.server_endpoints == ["10.0.0.1:6170", "10.0.0.2:6170"]


def test_hosts_share_the_cores_evenly() -> None:
    one = Host((), "127.0.0.1")
    assert [Cluster("", (one,), (one,), True, 1, (4, 5), "lo").core(rank) for rank in range(2)] == [4, 5]
    four = Cluster("", (one,) * 2, (one,) * 2, True, 1, (4, 5), "lo")
    assert [four.core(rank) for rank in range(4)] == [4, 5, 5, 4]


def test_turns_are_reported_by_step_without_the_warm_up() -> None:
    report, keys = Report("pserver --hosts", 2), ("penstock_sync", "torch_rpc_sync")
    results = Results(10, {"penstock_sync": [1.0, 2.0], "torch_rpc_sync": [4.0, 4.0]}, dict.fromkeys(keys, 1.0))
    turns = {key: Turns([9_000_000, 20_000, 20_000], [9, 10_000, 30_000], [0.9, 0.25, 0.25]) for key in keys}
    add_figures(report, (2, 1), LINKS["1gbit"], results, turns, batch_size=100)
    assert report.figures["2+1_1gbit_penstock_sync_samples_per_s"] == 750
    assert report.figures["2+1_1gbit_penstock_sync_to_servers_kb_per_step"] == 2.0
    assert report.figures["2+1_1gbit_penstock_sync_to_trainers_kb_per_step"] == 2.0
    assert report.figures["2+1_1gbit_penstock_sync_exposed_share"] == 0.25
    assert report.figures["2+1_1gbit_penstock_sync_cpu_ms_per_step"] == 50.0
    assert report.ratios == {"2+1_1gbit_penstock_sync_of_torch_rpc_sync": 3.0}
