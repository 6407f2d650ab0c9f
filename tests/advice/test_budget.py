"""Which settings are simulated at all: work that is known beforehand, and what a program allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.advice.test_ranked_settings import op, run

from penstock.advice import budget
from penstock.advice.budget import OWN_WORK, affordable, work_of
from penstock.advice.costs import Costs
from penstock.advice.plan import tasks_of, template_of
from penstock.advice.recorded import Recorded
from penstock.advice.setting import Setting

CORES = 16
SETTINGS = [
    Setting(1, 1, "reduce"), Setting(1, 8, "reduce"), Setting(8, 8, "all_reduce"), Setting(16, 64, "all_reduce", 0),
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.name)
def test_work_is_known_without_planning(setting: Setting) -> None:
    made = run(cores=CORES)
    template = template_of(made.graph)
    tasks = tasks_of(template, made, setting, Costs(made))
    planned = sum(OWN_WORK + setting.workers(CORES) + len(task.before) for task in tasks)
    # small gradients share an exchange, which is not known before: at most so much is counted too much
    assert planned <= work_of(template, setting, CORES) <= 1.2 * planned


def test_every_setting_of_a_small_graph_is_simulated() -> None:
    settings, left_out = affordable(run(cores=CORES))
    assert len(settings) > 10 and left_out == []


def test_settings_beyond_the_budget_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(cores=CORES)
    template = template_of(made.graph)
    every, _ = affordable(made)
    work = {setting: work_of(template, setting, CORES) for setting in every}
    monkeypatch.setattr(budget, "MOST_WORK_OF_ALL", sum(work.values()) // 2)
    settings, left_out = affordable(made)
    assert settings[0] == made.setting and set(settings) | set(left_out) == set(every)
    assert sum(work[one] for one in settings) <= budget.MOST_WORK_OF_ALL
    assert max(work[one] for one in settings[1:]) <= min(work[one] for one in left_out)
    monkeypatch.undo()
    monkeypatch.setattr(budget, "MOST_WORK", max(work.values()) - 1)
    assert affordable(made)[1] == [one for one in every if work[one] == max(work.values())]
    monkeypatch.setattr(budget, "MOST_WORK", work[made.setting] - 1)
    assert affordable(made) == ([], every)


def sending(made: Recorded) -> Recorded:
    """Return the recording with a last operator that sends to parameter servers."""
    send = op("send", "communication", -1, [], []).model_copy(update={"kind": "rpc"})
    return replace(made, graph=made.graph.model_copy(update={"ops": [*made.graph.ops, send]}), op_ns=(*made.op_ns, 1.0))


def test_a_program_with_servers_is_offered_no_all_reduce() -> None:
    """The executor runs it as Reduce, and warns."""
    settings, left_out = affordable(sending(run()))
    assert left_out == [] and {one.exchange for one in settings} == {"reduce"}
    assert max(one.cpu_num for one in settings) > 1
    assert "all_reduce" in {one.exchange for one in affordable(run())[0]}
