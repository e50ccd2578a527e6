"""The axes of the design as objects, one file each: a method of compression is a choice on every axis."""
