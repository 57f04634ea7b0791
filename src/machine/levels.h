// One kernel table for each instruction set level that a room is compiled at, and which of them a processor takes.
//
// A room names a family of levels, here and in its CMakeLists.txt, and no level:
//   OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, rowwise, Kernels, kKernels, kernels)
// stands in one source of the room, in namespace opst. kKernels is the constant that the room's *_isa.cc defines in
// opst::avx2::rowwise and so on (and declares extern first: else a constant is known in its own file only); the line
// defines
//   const Kernels& opst::rowwise::kernels(Isa isa)
// as the table of the highest level of the family that `isa` includes.
//
// A new level: its enumerator, its base and kNumIsaLevels in opst/context.h, its name and how a processor shows it in
// cpu.cc, its families here, its flags and families in cmake/OpstBuild.cmake; then the places that name all levels to
// users (help of tools/opst/main.cc, docs/program.md, python/bindings/context.cc). levels_test compares the two lists of families,
// scripts/check_layers.py the families that a room names here and there.
#pragma once

#include <cstddef>

#include "opst/context.h"

namespace opst {

// The highest level that both include.
constexpr Isa common_level(Isa a, Isa b) {
  while (!includes(b, a)) a = base_of(a);
  return a;
}

template <class Table>
struct TableAtLevel {
  Isa level;
  const Table* table;
};

// The first table whose level `isa` includes. The tables come in descending order; the last is generic's.
template <class Table, size_t n>
const Table& table_for(Isa isa, const TableAtLevel<Table> (&tables)[n]) {
  size_t i = 0;
  while (i + 1 < n && !includes(isa, tables[i].level)) ++i;
  return *tables[i].table;
}

}  // namespace opst

// Families: each(level, ...) for every level of the family, highest first. By what the kernels use:
//   FLOAT  f32 and f64 products, conversions, copies
//   BF16   + the pairwise dot product of bf16
//   INT8   + the dot product of bytes
//   ALL    both
#if defined(__x86_64__)
#define OPST_FLOAT_LEVELS(each, ...) each(avx512, __VA_ARGS__) each(avx2, __VA_ARGS__) each(generic, __VA_ARGS__)
#define OPST_BF16_LEVELS(each, ...) each(avx512_bf16, __VA_ARGS__) OPST_FLOAT_LEVELS(each, __VA_ARGS__)
#define OPST_INT8_LEVELS(each, ...) each(avx512_vnni, __VA_ARGS__) OPST_FLOAT_LEVELS(each, __VA_ARGS__)
#define OPST_ALL_LEVELS(each, ...) \
  each(avx512_bf16, __VA_ARGS__) each(avx512_vnni, __VA_ARGS__) OPST_FLOAT_LEVELS(each, __VA_ARGS__)
#else
#define OPST_FLOAT_LEVELS(each, ...) each(generic, __VA_ARGS__)
#define OPST_BF16_LEVELS OPST_FLOAT_LEVELS
#define OPST_INT8_LEVELS OPST_FLOAT_LEVELS
#define OPST_ALL_LEVELS OPST_FLOAT_LEVELS
#endif

#define OPST_DECLARE_TABLE(level, room, Table, name) \
  namespace level::room {                            \
  extern const opst::room::Table name;               \
  }
#define OPST_TABLE_AT_LEVEL(level, room, Table, name) {Isa::level, &level::room::name},
#define OPST_KERNELS_BY_LEVEL(family, room, Table, name, function)                                       \
  family(OPST_DECLARE_TABLE, room, Table, name) namespace room {                                         \
    const Table& function(Isa isa) {                                                                     \
      static constexpr TableAtLevel<Table> kTables[] = {family(OPST_TABLE_AT_LEVEL, room, Table, name)}; \
      return table_for(isa, kTables);                                                                    \
    }                                                                                                    \
  }
