"""Reports: console, metrics files, trackers, samples, plots."""

from crossrl.report.loggers import RunName
from crossrl.report.metrics_file import MetricsFile, ReportError, read_metrics
from crossrl.report.reporter import Reporter
from crossrl.report.samples import Sample

__all__ = ["MetricsFile", "ReportError", "Reporter", "RunName", "Sample", "read_metrics"]
