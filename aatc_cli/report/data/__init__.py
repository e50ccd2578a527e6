"""What a report is made of, loaded and plain; and which of it may stand together."""
