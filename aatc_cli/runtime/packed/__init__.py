"""The packed cache: codes at any widths in sorted planes, unpacked by torch on any device."""
