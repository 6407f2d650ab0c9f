"""Jobs that the schema allows, and values that may stand in the place of any of their fields, for Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
NAME = st.from_regex(r"\A[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\Z")
MEMORY = st.sampled_from(["1GiB", "512 MB", "1", " 7 TiB "])
RESOURCES = st.fixed_dictionaries(
    {"count": st.integers(1, 10_000)},
    optional={"cpus": st.integers(0, 4096), "gpus": st.integers(0, 64), "memory": MEMORY},
)
BUDGET = st.fixed_dictionaries({}, optional={"max_restarts": st.integers(0, 1000), "first_pause_s": st.floats(0, 128)})
RESTART = st.fixed_dictionaries(
    {},
    optional={
        "max_restarts": st.integers(0, 1000),
        "window_s": st.floats(1, 1e6) | st.none(),
        "on": st.lists(st.sampled_from(["infra", "user", "hang"]), max_size=3),
        "budgets": st.fixed_dictionaries({}, optional={"user": BUDGET, "preempted": BUDGET | st.none()}),
    },
)
OPTIONAL = {
    "project": NAME,
    "priority": st.integers(-1000, 1000),
    "workdir": TEXT,
    "snapshot": st.from_regex(r"\A[0-9a-f]{64}\Z"),
    "env": st.dictionaries(st.from_regex(r"\A[A-Z]{1,8}\Z").map(lambda name: f"MY_{name}"), TEXT, max_size=3),
    "node_selector": st.dictionaries(st.sampled_from(["gpu", "zone/rack"]), st.sampled_from(["", "a100"]), max_size=2),
    "restart": RESTART,
    "checkpoint": st.fixed_dictionaries({}, optional={"every_steps": st.integers(1, 10**6), "keep": st.integers(1, 9)}),
    "limits": st.fixed_dictionaries({}, optional={"memory": MEMORY, "cpus": st.floats(0.01, 65_536)}) | st.none(),
    "max_duration_s": st.floats(1, 1e6) | st.none(),
    "stop_grace_s": st.floats(0, 600),
    "on_disconnect": st.sampled_from(["continue", "stop"]),
}
ROLES = st.one_of(
    st.fixed_dictionaries({"mode": st.just("pserver"), "pservers": RESOURCES}, optional={"trainers": RESOURCES}),
    st.fixed_dictionaries({}, optional={"mode": st.sampled_from(["local", "command"]), "trainers": RESOURCES}),
)
JOBS = st.builds(
    lambda first, roles: {**first, **roles},
    st.fixed_dictionaries({"name": NAME, "entrypoint": st.lists(TEXT, min_size=1, max_size=4)}, optional=OPTIONAL),
    ROLES,
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.binary(max_size=4)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3), max_leaves=8
)
FIELDS = [*OPTIONAL, "name", "entrypoint", "mode", "trainers", "pservers", "unknown"]
