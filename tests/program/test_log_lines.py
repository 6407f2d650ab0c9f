"""The library's log lines: on stderr by default, left to the application's handlers where it has any, warnings once."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref

import pytest

from penstock.logger import warn_once

LOGGER = logging.getLogger("penstock.ps.client")
LINES = """
log = logging.getLogger("penstock.ps.client")
log.debug("detail"), log.info("progress"), log.warning("advice %d", 7)
"""


def stderr_of(code: str) -> str:
    """Run code in a process without the handlers of pytest."""
    command = [sys.executable, "-c", "import io, logging, sys\n" + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stderr


def test_without_configuration_lines_go_to_stderr_from_info_on() -> None:
    assert stderr_of("import penstock" + LINES) == "penstock: progress\npenstock: advice 7\n"


@pytest.mark.parametrize("logger", ["", "penstock", "penstock.ps"])
def test_a_line_that_a_handler_receives_is_not_written_twice(logger: str) -> None:
    configure = f"""
import penstock
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
logging.getLogger({logger!r}).addHandler(handler)"""
    received = "INFO penstock.ps.client progress\nWARNING penstock.ps.client advice 7\n"
    assert stderr_of(configure + LINES) == received


def test_a_line_that_no_handler_takes_goes_to_stderr() -> None:
    configure = (
        "import penstock; logging.basicConfig(level=logging.ERROR, handlers=[logging.FileHandler('/dev/null')])\n"
    )
    configure += "logging.getLogger().handlers[0].setLevel(logging.ERROR)"
    assert stderr_of(configure + LINES) == "penstock: progress\npenstock: advice 7\n"


def test_lines_are_written_once_after_a_second_import() -> None:
    configure = "import importlib, penstock; importlib.reload(penstock)"
    assert stderr_of(configure + LINES) == "penstock: progress\npenstock: advice 7\n"


def test_a_logger_that_does_not_propagate_writes_to_stderr() -> None:
    configure = "import penstock; logging.basicConfig(); logging.getLogger('penstock').propagate = False"
    assert stderr_of(configure + LINES) == "penstock: progress\npenstock: advice 7\n"


def test_a_level_that_the_application_has_set_holds() -> None:
    configure = "logging.getLogger('penstock').setLevel(logging.WARNING); import penstock"
    assert stderr_of(configure + LINES) == "penstock: advice 7\n"


def test_lines_follow_a_replaced_stderr() -> None:
    code = (
        "import penstock; old, sys.stderr = sys.stderr, io.StringIO()" + LINES + "print(repr(sys.stderr.getvalue()), "
    )
    assert stderr_of(code + "file=old)") == "'penstock: progress\\npenstock: advice 7\\n'\n"


def test_an_unwritable_stderr_ends_nothing() -> None:
    assert (
        stderr_of("import penstock; old, sys.stderr = sys.stderr, None" + LINES + "print('end', file=old)") == "end\n"
    )


class Owner(dict[str, int]):
    """An object that cannot be hashed, as some configurations."""


def test_a_warning_is_logged_once_for_each_owner(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Owner(), Owner()
    for owner in (first, first, second):
        warn_once(LOGGER, "no effect", owner)
    warn_once(LOGGER, "another text", first)
    assert caplog.messages == ["no effect", "no effect", "another text"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert {record.filename for record in caplog.records} == {"test_log_lines.py"}


def test_a_subject_is_warned_of_once_with_any_text(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    for text in ("cannot read", "cannot write"):
        warn_once(LOGGER, text, owner, about="file")
    assert caplog.messages == ["cannot read"]


def test_without_an_owner_a_warning_is_logged_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    text = "only in this test, which runs once in a process"
    for _ in range(2):
        warn_once(LOGGER, text)
    assert caplog.messages == [text]


def test_an_owner_that_was_warned_is_not_kept_alive() -> None:
    owner = Owner()
    warn_once(LOGGER, "no effect", owner)
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None
