#!/usr/bin/env bash
# Installs libvmm_pool.so, its headers, its pkg-config file and the Python module.
#
# usage: crates/library/install.sh PREFIX [--release] [--library FILE]
#   --release       builds with optimisation; without it, a debug build
#   --library FILE  installs a library that was built before, and builds nothing
#
# PREFIX/lib/libvmm_pool.so.1 (1 is the ABI version) with the link libvmm_pool.so, PREFIX/include/*.h and *.hpp,
# PREFIX/lib/pkgconfig/vmm_pool.pc, PREFIX/lib/python/vmm_pool. DESTDIR, if set, comes before PREFIX
# where files are written, and is not written into them.
set -euo pipefail

usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

prefix='' profile=debug library=''
while [ $# -gt 0 ]; do
    case "$1" in
        --release) profile=release ;;
        --library) [ $# -gt 1 ] || usage; library="$2"; shift ;;
        -*) usage ;;
        *) [ -z "$prefix" ] || usage; prefix="$1" ;;
    esac
    shift
done
[ -n "$prefix" ] || usage
case "$prefix" in
    /*) ;;
    *) prefix="$PWD/$prefix" ;;
esac
[ -z "$library" ] || library=$(realpath -- "$library")

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
if [ -z "$library" ]; then
    flags=()
    [ "$profile" = debug ] || flags=(--release)
    (cd "$root" && cargo build "${flags[@]}" -p vmm-pool-library)
    library="${CARGO_TARGET_DIR:-$root/target}/$profile/libvmm_pool.so"
fi
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$root/Cargo.toml")
abi=$(sed -n 's/^#define VMM_POOL_ABI_VERSION //p' "$root/crates/capi/include/vmm_pool.h")

to="${DESTDIR:-}$prefix"
install -d "$to/lib/pkgconfig" "$to/include"
install -m 755 "$library" "$to/lib/libvmm_pool.so.$abi"
ln -sf "libvmm_pool.so.$abi" "$to/lib/libvmm_pool.so"
install -m 644 "$root"/crates/{capi,torch,cupy}/include/*.h "$here"/include/*.hpp "$to/include/"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$here/vmm_pool.pc.in" \
    >"$to/lib/pkgconfig/vmm_pool.pc"
if [ -d "$here/python/vmm_pool" ]; then
    (cd "$here/python" && find vmm_pool -type f ! -name '*.pyc' -print0 |
        while IFS= read -r -d '' file; do install -D -m 644 "$file" "$to/lib/python/$file"; done)
fi
echo "installed in $to"
