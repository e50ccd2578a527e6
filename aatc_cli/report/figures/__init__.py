"""Drawing: each function takes prepared series and returns one SVG element."""
