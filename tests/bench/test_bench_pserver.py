"""`bench pserver`: who races, and which ratio is of whom."""

from __future__ import annotations

import pytest
from bench.peers.contender import CONTENDERS
from bench.peers.race import Results
from bench.pserver import PEERS, SERVED, add_figures, chosen
from bench.report import Report


def test_peers_are_those_with_servers_that_are_not_ours() -> None:
    assert chosen(None) == PEERS == ["torch_rpc_ps", "tensorflow_ps", "paddle_brpc_ps"]
    modes = ["", "_async", "_log", "_async_log", "_half", "_geo", "_two"]
    assert [f"penstock_ps{mode}" for mode in modes] == SERVED
    assert chosen("") == []
    assert all(CONTENDERS[key].served for key in (*PEERS, *SERVED))


def test_an_unknown_peer_is_named_with_those_that_are_known() -> None:
    with pytest.raises(SystemExit, match=r"unknown peer torch_eager; expected torch_rpc_ps, tensorflow_ps"):
        chosen("torch_eager")


def test_shares_and_ratios_refer_to_pairs_of_the_same_round() -> None:
    seconds = {
        "penstock": [1.0, 2.0],
        "penstock_ps": [2.0, 2.0],
        "penstock_ps_async": [1.25, 4.0],
        "penstock_ps_log": [2.0, 2.0],
        "penstock_ps_async_log": [2.0, 2.0],
        "penstock_ps_half": [2.0, 2.0],
        "penstock_ps_geo": [2.0, 2.0],
        "penstock_ps_two": [4.0, 8.0],
        "tensorflow_ps": [5.0, 8.0],
    }
    losses = {key: [0.5] for key in seconds}
    report = Report("pserver", 2)
    add_figures(report, Results(10, seconds, dict.fromkeys(seconds, 1.0), losses), batch_size=100)
    assert report.ratios["of_local_penstock_ps"] == 0.75  # 0.5 and 1.0
    assert report.ratios["of_local_penstock_ps_two"] == 0.25
    assert report.ratios["tensorflow_ps"] == 4.0  # 5 / 1.25 and 8 / 2
    assert report.figures["penstock_samples_per_s"] == 750.0
    assert report.figures["tensorflow_ps_cpu_ms_per_step"] == 50.0
