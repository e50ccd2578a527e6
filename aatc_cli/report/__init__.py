"""The report of a run: tables and figures from evaluations and plans, as Markdown, one HTML page, CSV and JSON.

    data (what a report is made of) -> series -> figures, tables -> document (sections in order) -> render (text)

Nothing here reads a run directory; `stages.reporting` does and hands over a `ReportData`.
"""
