"""Tables of the report; they know nothing of Markdown or HTML."""
