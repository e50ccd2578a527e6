"""The numbers behind tables and figures, apart from the drawing: what a test can compare with the evaluations."""
