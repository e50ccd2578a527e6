"""The report as a sequence of sections, before it becomes Markdown or HTML."""
