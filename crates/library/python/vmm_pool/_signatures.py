"""What the functions of vmm_pool.h, vmm_pool_torch.h and vmm_pool_cupy.h take and answer, and their structs.

tests/test_library.py compares all of it with the headers.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_size_t, c_ssize_t, c_uint32, c_uint64, c_void_p


class _Versioned(ctypes.Structure):
    """Says its own length, which the library looks at."""

    def __init__(self, **fields):
        super().__init__(struct_bytes=ctypes.sizeof(self), **fields)


class PoolOptions(_Versioned):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("flags", c_uint32),
        ("devices", POINTER(c_int32)),
        ("device_count", c_uint64),
        ("chunk_bytes", c_uint64),
        ("limit_bytes", c_uint64),
        ("stock_low_bytes", c_uint64),
        ("stock_high_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("host_node", c_uint32),
        ("reserved", c_uint32),
    ]


class BlockInfo(_Versioned):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("device", c_int32),
        ("address", c_uint64),
        ("bytes", c_uint64),
    ]


class ElasticOptions(_Versioned):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("device", c_int32),
        ("capacity_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("tag", c_char_p),
        ("quota_bytes", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    ]


class ElasticInfo(_Versioned):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("device", c_int32),
        ("address", c_uint64),
        ("capacity_bytes", c_uint64),
        ("committed_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("generation", c_uint64),
        ("open_uses", c_uint64),
        ("device_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("asleep", c_int32),
        ("reserved", c_uint32),
    ]


class ImportFacts(_Versioned):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("device", c_int32),
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("generation", c_uint64),
        ("access", c_int32),
        ("state", c_int32),
    ]


STRUCTS = {
    "vmm_pool_options": PoolOptions,
    "vmm_pool_block_info": BlockInfo,
    "vmm_elastic_options": ElasticOptions,
    "vmm_elastic_state": ElasticInfo,
    "vmm_import_facts": ImportFacts,
}

_OUT = POINTER(c_uint64)
_HANDLE = POINTER(c_void_p)

# Name: what it answers, what it takes. Handles, streams and addresses are c_void_p.
FUNCTIONS = {
    "vmm_pool_abi_version": (c_uint32, []),
    "vmm_pool_version": (c_char_p, []),
    "vmm_pool_last_error": (c_char_p, []),
    "vmm_pool_last_status": (c_int32, []),
    "vmm_pool_create": (c_int32, [POINTER(PoolOptions), _HANDLE]),
    "vmm_pool_destroy": (c_int32, [c_void_p]),
    "vmm_pool_default": (c_int32, [c_int, _HANDLE]),
    "vmm_pool_alloc": (c_int32, [c_void_p, c_int, c_uint64, c_void_p, _HANDLE]),
    "vmm_pool_free": (c_int32, [c_void_p, c_uint64, c_void_p]),
    "vmm_pool_record_stream": (c_int32, [c_void_p, c_void_p]),
    "vmm_pool_stream_destroyed": (c_int32, [c_int, c_void_p]),
    "vmm_pool_block": (c_int32, [c_void_p, POINTER(BlockInfo)]),
    "vmm_pool_stats_json": (c_int32, [c_void_p, c_char_p, c_size_t, POINTER(c_size_t)]),
    "vmm_pool_report": (c_int32, [c_void_p, c_int, c_char_p, c_size_t, POINTER(c_size_t)]),
    "vmm_pool_trim": (c_int32, [c_void_p, c_int, _OUT]),
    "vmm_pool_sleep": (c_int32, [c_void_p, c_char_p, c_int32, c_uint64, _OUT]),
    "vmm_pool_wake": (c_int32, [c_void_p, c_char_p, _OUT]),
    "vmm_elastic_reserve": (c_int32, [c_void_p, POINTER(ElasticOptions), _HANDLE]),
    "vmm_elastic_release": (c_int32, [c_void_p]),
    "vmm_elastic_grow": (c_int32, [c_void_p, c_uint64, _OUT]),
    "vmm_elastic_shrink": (c_int32, [c_void_p, c_uint64, _OUT]),
    "vmm_elastic_migrate": (c_int32, [c_void_p, c_int32, c_uint32, c_uint64, _OUT]),
    "vmm_elastic_grant": (c_int32, [c_void_p, c_int, c_int32]),
    "vmm_elastic_revoke": (c_int32, [c_void_p, c_int]),
    "vmm_elastic_info": (c_int32, [c_void_p, POINTER(ElasticInfo)]),
    "vmm_elastic_use_on": (c_int32, [c_void_p, c_int32, c_void_p, _HANDLE]),
    "vmm_use_end": (c_int32, [c_void_p]),
    "vmm_import_connect": (c_int32, [c_char_p, c_uint64, _HANDLE]),
    "vmm_import_disconnect": (c_int32, [c_void_p]),
    "vmm_import_open": (c_int32, [c_void_p, c_char_p, c_int32, _HANDLE]),
    "vmm_import_check": (c_int32, [c_void_p, POINTER(c_int32)]),
    "vmm_import_refresh": (c_int32, [c_void_p, c_uint64]),
    "vmm_import_info": (c_int32, [c_void_p, POINTER(ImportFacts)]),
    "vmm_import_close": (c_int32, [c_void_p]),
    "vmm_pool_torch_alloc": (c_void_p, [c_ssize_t, c_int, c_void_p]),
    "vmm_pool_torch_free": (None, [c_void_p, c_ssize_t, c_int, c_void_p]),
    "vmm_pool_torch_record_stream": (None, [c_void_p, c_void_p]),
    "vmm_pool_torch_empty_cache": (None, []),
    "vmm_pool_torch_stream_destroyed": (None, [c_int, c_void_p]),
    "vmm_pool_torch_capture_begin": (c_uint64, [c_int, c_void_p, c_uint64]),
    "vmm_pool_torch_capture_join": (c_int, [c_uint64, c_int, c_void_p]),
    "vmm_pool_torch_capture_end": (c_int, [c_uint64]),
    "vmm_pool_torch_graph_launched_on": (c_int, [c_uint64, c_int, c_void_p]),
    "vmm_pool_torch_graph_destroyed": (c_int, [c_uint64]),
    "vmm_pool_torch_last_error": (c_char_p, []),
    "vmm_pool_torch_init": (None, [c_int]),
    "vmm_pool_torch_reset": (None, []),
    "vmm_pool_torch_stats_json": (c_char_p, [c_int]),
    "vmm_pool_torch_report": (c_char_p, [c_int]),
    "vmm_pool_torch_memory_fraction": (c_int, [c_double, c_int]),
    "vmm_pool_torch_base_alloc": (c_void_p, [c_void_p, POINTER(c_size_t)]),
    "vmm_pool_cupy_malloc": (c_void_p, [c_void_p, c_size_t, c_int]),
    "vmm_pool_cupy_free": (None, [c_void_p, c_void_p, c_int]),
    "vmm_pool_cupy_synchronize": (c_int, [c_int]),
}


def declare(library: ctypes.CDLL) -> None:
    """Tells ctypes. A library that was built without a part of them is found out by the first call there."""
    for name, (answer, arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            continue
        function.restype, function.argtypes = answer, arguments
