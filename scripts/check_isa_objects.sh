#!/usr/bin/env bash
# Fails where an object that was compiled for one instruction set level defines a symbol that the linker could use for
# all: a weak or unique one (inline functions, template instances, COMDAT data) outside opst::<level>::.
#
#   check_isa_objects.sh LIST | --self-test
# LIST has a line "level object" for each object; the build writes it (isa_objects.txt). Meant for the release build:
# without optimisation every inline function is a symbol.
set -euo pipefail
export LC_ALL=C

if [ "$1" = --self-test ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  cat > "$folder/planted.cc" << 'END'
namespace opst {
template <class T> __attribute__((noinline)) T shared(T x) { return x + 1; }
namespace avx2 {
template <class T> __attribute__((noinline)) T own(T x) { return x + 2; }
int use(int x) { return own(x) + shared(x); }
}
}
END
  ${CXX:-g++} -O2 -c "$folder/planted.cc" -o "$folder/planted.o"
  echo "avx2 $folder/planted.o" > "$folder/list"
  found=$("$0" "$folder/list" || true)
  if [[ $found != *"outside opst::avx2:: int opst::shared<int>(int)"* || $found == *"own<int>"* ]]; then
    echo "isa objects: the self-test expected shared<int> alone to be found, and got: $found"
    exit 1
  fi
  echo "isa objects: the self-test found the planted symbol"
  exit 0
fi

list=$1
objects=0
symbols=0
bad=0
while read -r level object; do
  objects=$((objects + 1))
  # Mangled names, since there the scope comes first: _ZN4opst4avx2..., also after the marks of vtables (TV), type
  # information (TI, TS), guards (GV), thunks (Th) and things local to a function (Z).
  inside="^_Z(T[VIST]|GV|Th?n?[0-9]*_|Z)*N[KVrRO]*4opst${#level}${level}[0-9CDEKLT]"
  while read -r _ kind name; do
    symbols=$((symbols + 1))
    case $kind in
      W | w | V | v | u) ;;
      *) continue ;;
    esac
    [[ $name =~ $inside ]] && continue
    bad=$((bad + 1))
    echo "$object: weak symbol outside opst::$level:: $(c++filt "$name")"
  done < <(nm --defined-only "$object")
done < "$list"

if [ "$objects" -eq 0 ]; then
  echo "isa objects: $list names no object"
  exit 1
fi
echo "isa objects: $objects objects, $symbols symbols, $bad weak ones outside their level's namespace"
[ "$bad" -eq 0 ]
