"""The agent's report about its machine: what `penstock doctor --no-torch` finds there and is not ok.

Made once, when the agent starts; logged, and sent to the server with each hello. Takes some 30 ms, in a thread.
"""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.machine.findings import Finding, to_mend
from penstock.machine.survey import findings_of_machine, read_state_folder

_log = logging.getLogger(__name__)


def look(state_dir: Path) -> tuple[Finding, ...]:
    """Return the warnings and errors about this machine, and log them. Raises SpecError for a wrong PENSTOCK_ABSENT."""
    state = read_state_folder(state_dir, advice="give the agent another folder with --state-dir").finding()
    found = to_mend((*findings_of_machine(), state))
    for one in found:
        level = logging.ERROR if one.level == "error" else logging.WARNING
        _log.log(level, "this machine: %s: %s; %s", one.name, one.detail, one.advice)
    return found
