"""Why a job is as fast as it is: ranked findings with measurements, from sums that its processes have sent. Pure."""

from penstock.diagnosis.ranked import FULL_BYTES, diagnose
from penstock.diagnosis.sums import Disk, Finding, Link, OpSum, Sums, TableLoad, Trainer, Wait

__all__ = ["FULL_BYTES", "Disk", "Finding", "Link", "OpSum", "Sums", "TableLoad", "Trainer", "Wait", "diagnose"]
