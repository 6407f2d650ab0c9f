"""What `penstock doctor` finds on this node's machine, as the agent sends it with each hello."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.machine.findings import Finding, to_mend
from penstock.machine.survey import findings_of_machine, read_state_folder

_log = logging.getLogger(__name__)


def look_at_machine(state_dir: Path) -> tuple[Finding, ...]:
    """Return what `penstock doctor --no-torch` finds here and is not ok, and log it: sent with each hello. Some 30 ms.

    Raises SpecError for a wrong PENSTOCK_ABSENT.
    """
    state = read_state_folder(state_dir, advice="give the agent another folder with --state-dir").finding()
    found = to_mend((*findings_of_machine(), state))
    for one in found:
        level = logging.ERROR if one.level == "error" else logging.WARNING
        _log.log(level, "this machine: %s: %s; %s", one.name, one.detail, one.advice)
    return found
