"""One HTML page that shows a model's predictions for a file or for examples in memory."""

from structgp.report.findings import Findings, Text, examine
from structgp.report.from_python import write_page
from structgp.report.page import render

__all__ = ["Findings", "Text", "examine", "render", "write_page"]
