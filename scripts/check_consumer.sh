#!/usr/bin/env bash
# Builds examples/attention, and examples/c_api in C, as a stranger would, outside the tree, and runs them.
#
#   check_consumer.sh BUILD          installs BUILD into a scratch folder; then by find_package and by pkg-config
#   check_consumer.sh BUILD fetch    also by FetchContent, which compiles the library once more
set -euo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Debian's cmake alone comes with no make.
export CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja}

# quiet COMMAND...: its output only where it fails
quiet() { "$@" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }; }

cp -r "$root/examples/attention" "$work/consumer"
cp -r "$root/examples/c_api" "$work/c_consumer"
quiet cmake --install "$build" --prefix "$work/first"
# An installed tree may be moved.
mv "$work/first" "$work/prefix"

quiet cmake -S "$work/consumer" -B "$work/found" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix"
quiet cmake --build "$work/found"
"$work/found/attention" > "$work/expected"
[ -s "$work/expected" ]
echo "consumer: find_package"

pc=$(dirname "$(find "$work/prefix" -name opst.pc)")
# shellcheck disable=SC2046
quiet ${CXX:-g++} -std=c++20 -O2 "$work/consumer/main.cc" -o "$work/by_pkg_config" \
  $(PKG_CONFIG_PATH=$pc pkg-config --cflags --libs opst)
LD_LIBRARY_PATH=$(dirname "$pc") "$work/by_pkg_config" | cmp - "$work/expected"
echo "consumer: pkg-config"

quiet cmake -S "$work/c_consumer" -B "$work/c_found" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix"
quiet cmake --build "$work/c_found"
"$work/c_found/c_api" > "$work/c_expected"
[ -s "$work/c_expected" ]
echo "consumer: C, find_package"

# By a C compiler alone. What a static library needs besides itself, a shared one does not mind.
# shellcheck disable=SC2046
quiet ${CC:-gcc} -std=c11 -Wall -Wextra -pedantic -Werror -O2 "$work/c_consumer/main.c" -o "$work/c_by_pkg_config" \
  $(PKG_CONFIG_PATH=$pc pkg-config --static --cflags --libs opst)
LD_LIBRARY_PATH=$(dirname "$pc") "$work/c_by_pkg_config" | cmp - "$work/c_expected"
echo "consumer: C, pkg-config"
"$root/scripts/check_abi.py" "$(find "$work/prefix" -name 'libopst.a' -o -name 'libopst.so')"

# Nothing but what is promised.
if find "$work/prefix" -type f | grep -vE '/include/opst/[a-z0-9_]+\.h$|/libopst\.(a|so[0-9.]*)$|/opst[-_][a-z-]*\.cmake$|/opst\.pc$|/bin/opst$|/share/opst/machines/[a-z0-9-]*\.machine$|/LICENSE$'; then
  echo "consumer: the files above are installed, but promised nowhere" >&2
  exit 1
fi

if [ "${2:-}" = fetch ]; then
  # As deep below the root as build/release, so that the compiler cache knows the objects.
  fetched=$root/build/fetched
  rm -rf "$fetched"
  quiet cmake -S "$work/consumer" -B "$fetched" -DCMAKE_BUILD_TYPE=Release -DOPST_SOURCE="$root" \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)"
  quiet cmake --build "$fetched" -j "${JOBS:-$(nproc)}"
  "$fetched/attention" | cmp - "$work/expected"
  echo "consumer: FetchContent"
fi
