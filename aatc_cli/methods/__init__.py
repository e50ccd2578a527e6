"""The axes of the design as objects: a method of compression is one choice on every axis.

Each file of `transforms`, `weights`, `allocators`, `quantizers` and `classes` is one choice: its name, what it needs,
what it goes with, its bytes, its tables and its codec. `registry` lists them, `recipe` reads them from TOML. Importing
any of them loads neither torch nor numpy nor pydantic: what computes is imported where it is called, so that names can
be listed at once. Nothing here knows files or models; tensors come through `sites.Tensors`.
"""
