"""`paddle.fluid.log_helper`: loggers of scripts. Source: python/paddle/fluid/log_helper.py (Fluid 1.8)."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]


def get_logger(name: str, level: int, fmt: str | None = None) -> logging.Logger:
    """Return the logger `name`, which writes records from `level` on to stderr, in the format `fmt`, and nowhere else.

    Asked for again, it gets the level and format of that call and keeps its one handler.
    """
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    if fmt is not None:
        logger.handlers[0].setFormatter(logging.Formatter(fmt))
    return logger
