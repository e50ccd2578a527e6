"""The document as text: Markdown, one page of HTML, CSV and JSON. The same data give the same bytes."""
