"""The report on a cross-examination: one HTML page, from what lies in the experiment's folder."""

from crossrl.cross.report.page import write_report

__all__ = ["write_report"]
