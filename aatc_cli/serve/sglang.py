"""SGLang: the storage of HiCache, page by page.

    --page-size 64 --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "aatc",
    "module_path": "aatc_cli.serve.sglang", "class_name": "AatcStorage", "interface_v1": 1, "aatc": {"plan": ...,
    "model": ..., "store": ...}}'

The position of a page is how many pages its request has before it, which HiCache tells by `prefix_keys`; without them
nothing is stored or read. Imported inside of SGLang alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.pages import Pages
from aatc_cli.serve.chunks import EngineChunks
from aatc_cli.serve.opening import codec_of, require_version, settings_of

VERSIONS = ("0.5.23",)
# where layers and tokens are in a page of the host pool [2, ...], by its layout
_LAYOUTS = {"layer_first": False, "page_first": True}

HiCacheStorage: Any = import_module("sglang.srt.mem_cache.hicache_storage").HiCacheStorage


class AatcStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of the host pool as stored chunks; see the module for how it is configured."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        require_version("sglang", VERSIONS)
        c = storage_config
        if c.is_mla_model or c.pp_size != 1 or c.tp_size != 1:
            raise AatcError(
                "this plugin stores pages of whole models with keys and values",
                "run one rank (tp 1, pp 1) of a model without latent attention",
            )
        if not (c.extra_config or {}).get("interface_v1"):
            raise AatcError("HiCache tells positions by its interface v1 alone", 'add "interface_v1": 1')
        self.settings = settings_of(c.extra_config)
        self.salt = f"sglang {c.model_name}"
        self._chunks: EngineChunks | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Told of the host pool, whose pages are chunks: raises `AatcError` for one whose layout is not known."""
        super().register_mem_pool_host(mem_pool_host)
        if mem_pool_host.layout not in _LAYOUTS:
            raise AatcError(
                f"the host pool has the layout {mem_pool_host.layout}", "add --hicache-mem-layout layer_first"
            )
        codec = codec_of(self.settings, mem_pool_host.page_size)
        self._chunks = EngineChunks.of(codec, self.settings, self.salt)

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Fill pages of the host pool; whether each of them was filled."""
        first, page = self._place(extra_info), self.mem_pool_host.page_size
        found = []
        for index, key in enumerate(keys):
            pages = None if first is None else self.chunks.get(key, first + index * page, self.mem_pool_host.dtype)
            if pages is not None:
                self._write(int(host_indices[index * page]), pages)
            found.append(pages is not None)
        return found

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of the host pool; whether each of them is kept."""
        first, page = self._place(extra_info), self.mem_pool_host.page_size
        if first is None:
            return [False] * len(keys)
        return [
            self.chunks.put(key, self._read(int(host_indices[index * page])), first + index * page)
            for index, key in enumerate(keys)
        ]

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.chunks.has(key)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Nothing: this interface does not tell the position of a page."""
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        """Nothing, as `get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing is kept, as in `get`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing is kept, as in `get`."""
        return False

    @property
    def chunks(self) -> EngineChunks:
        """The chunks of the pool that was registered."""
        if self._chunks is None:
            raise AatcError("no host pool was registered yet", "HiCache does that when it starts")
        return self._chunks

    def _place(self, extra_info: Any) -> int | None:
        """Position of the first page of a call."""
        before = None if extra_info is None else extra_info.prefix_keys
        return None if before is None else len(before) * int(self.mem_pool_host.page_size)

    def _read(self, index: int) -> Pages:
        both = self.mem_pool_host.get_data_page(index, flat=False)
        both = both.transpose(1, 2) if _LAYOUTS[self.mem_pool_host.layout] else both
        return Pages(both[0], both[1])

    def _write(self, index: int, pages: Pages) -> None:
        both = torch.stack((pages.keys, pages.values)).cpu()
        both = both.transpose(1, 2) if _LAYOUTS[self.mem_pool_host.layout] else both
        self.mem_pool_host.set_from_flat_data_page(index, both.contiguous().flatten())
