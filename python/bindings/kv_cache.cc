#include "opst/kv_cache.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "view.h"

namespace opst::python {

namespace {

DType parse_dtype(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (name == to_string(dtype)) return dtype;
  }
  raise(PyExc_ValueError, "dtype is \"" + name + "\", pages are f32, bf16 or f16");
}

std::vector<int64_t> shape_of(const Tensor& tensor) { return {tensor.shape, tensor.shape + tensor.rank}; }

// The shapes of a cache's keys and values.
std::pair<std::vector<int64_t>, std::vector<int64_t>> page_shapes(const std::string& layout, const std::string& dtype,
                                                                  int64_t num_blocks, int64_t block_size,
                                                                  int64_t num_kv_heads, int64_t head_dim,
                                                                  int64_t value_head_dim) {
  const PageSizes sizes = {num_blocks, block_size, num_kv_heads, head_dim, value_head_dim};
  const PageLayout parsed = parse_layout(layout);
  const DType type = parse_dtype(dtype);
  for (const auto& [name, size] : {std::pair{"num_blocks", num_blocks},
                                   {"block_size", block_size},
                                   {"num_kv_heads", num_kv_heads},
                                   {"head_dim", head_dim},
                                   {"value_head_dim", value_head_dim}}) {
    if (size < 0) raise(PyExc_ValueError, std::string(name) + " is " + std::to_string(size) + ", must not be negative");
  }
  raise_if_failed(supports(parsed, type, block_size, head_dim));
  return {shape_of(key_pages(parsed, type, sizes, nullptr)), shape_of(value_pages(parsed, type, sizes, nullptr))};
}

void bind_page_format(nb::module_& module) {
  using nb::arg;
  nb::class_<PageFormat>(module, "PageFormat")
      .def_ro("rank", &PageFormat::rank)
      .def_prop_ro("dims", [](const PageFormat& f) { return std::vector<std::string>(f.dims, f.dims + f.rank); })
      .def_ro("heads_dim", &PageFormat::heads_dim)
      .def_ro("panel_rows", &PageFormat::panel_rows);
  module.def(
      "page_format",
      [](const std::string& layout, const std::string& dtype, const std::string& side) -> const PageFormat& {
        return page_format(parse_layout(layout), dtype == to_string(DType::bf16) ? DType::bf16 : DType::f32,
                           side == "key" ? PageSide::key : PageSide::value);
      },
      arg("layout"), arg("dtype"), arg("side"), nb::rv_policy::reference);
  module.def("page_shapes", &page_shapes, arg("layout"), arg("dtype"), arg("num_blocks"), arg("block_size"),
             arg("num_kv_heads"), arg("head_dim"), arg("value_head_dim"));
}

void bind_pool(nb::module_& module) {
  using nb::arg;
  using Blocks = std::vector<int64_t>;
  nb::class_<BlockPool>(
      module, "BlockPool",
      "Which blocks of a paged cache are in use, and by how many sequences: block ids, not memory.\n\n"
      "A block has as many references as sequences hold it. A refused call raises and changes "
      "nothing.")
      .def(
          "__init__",
          [](BlockPool* self, int64_t num_blocks) {
            new (self) BlockPool(value_or_raise(BlockPool::create(num_blocks)));
          },
          arg("num_blocks"), "Blocks 0 to num_blocks - 1, all free.")
      .def_prop_ro("num_blocks", &BlockPool::num_blocks)
      .def_prop_ro("num_free", &BlockPool::num_free)
      .def("references", &BlockPool::references, arg("block"), "Sequences that hold a block; 0: it is free.")
      .def(
          "allocate",
          [](BlockPool& pool, int64_t count) {
            if (count < 0) raise(PyExc_ValueError, "count is " + std::to_string(count) + ", must not be negative");
            if (count > pool.num_blocks()) {
              raise(PyExc_MemoryError, "BlockPool::allocate: " + std::to_string(count) + " blocks asked for, but " +
                                           std::to_string(pool.num_free()) + " of " +
                                           std::to_string(pool.num_blocks()) + " are free");
            }
            Blocks blocks(static_cast<size_t>(count));
            raise_if_failed(pool.allocate(blocks));
            return blocks;
          },
          arg("count") = 1, "Ids of free blocks, with one reference each. MemoryError where too few are free.")
      .def(
          "fork", [](BlockPool& pool, const Blocks& blocks) { raise_if_failed(pool.fork(blocks)); }, arg("blocks"),
          "One more reference each: another sequence has the same past.")
      .def(
          "free", [](BlockPool& pool, const Blocks& blocks) { raise_if_failed(pool.free(blocks)); }, arg("blocks"),
          "One reference less each; a block without any is free again.")
      .def(
          "prepare_write",
          [](BlockPool& pool, int64_t block) {
            const BlockWrite write = value_or_raise(pool.prepare_write(block));
            return std::pair{write.block, write.copy_from >= 0 ? std::optional(write.copy_from) : std::nullopt};
          },
          arg("block"),
          "(the block to write, the block whose rows must be copied into it first or None): a shared block gives way "
          "to a private one. MemoryError where none is free.");
}

}  // namespace

PageLayout parse_layout(const std::string& name) {
  for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
    if (name == to_string(layout)) return layout;
  }
  raise(PyExc_ValueError, "page_layout is \"" + name + "\", must be one of norm, panel32");
}

void bind_kv_cache(nb::module_& module) {
  using nb::arg;
  bind_page_format(module);
  module.def(
      "scatter_pa_kv_cache",
      [](Context& context, const View& key, const View& value, const View& slots, const View& key_cache,
         const View& value_cache, const std::string& layout) {
        run([&, k = key_cache.output("key_cache"), v = value_cache.output("value_cache"),
             o = ScatterOptions{.layout = parse_layout(layout)}] {
          return scatter_pa_kv_cache(context, key.input(), value.input(), slots.input(), k, v, o);
        });
      },
      arg("context"), arg("key"), arg("value"), arg("slot_mapping"), arg("key_cache"), arg("value_cache"),
      arg("layout"));
  module.def(
      "rope_scatter_pa_kv_cache",
      [](Context& context, const View& query, const View& key, const View& value, const View& cos, const View& sin,
         const View& slots, const View* query_weight, const View* key_weight, const View& query_out,
         const View& key_cache, const View& value_cache, const std::string& layout, const std::string& style,
         double eps) {
        const RopeScatterInputs inputs = {.query = query.input(),
                                          .key = key.input(),
                                          .value = value.input(),
                                          .cos = cos.input(),
                                          .sin = sin.input(),
                                          .slot_mapping = slots.input(),
                                          .query_weight = input_or_empty(query_weight),
                                          .key_weight = input_or_empty(key_weight)};
        const RopeScatterOptions options = {.layout = parse_layout(layout), .style = parse_style(style), .eps = eps};
        run([&, q = query_out.output("query_out"), k = key_cache.output("key_cache"),
             v = value_cache.output("value_cache")] {
          return rope_scatter_pa_kv_cache(context, inputs, q, k, v, options);
        });
      },
      arg("context"), arg("query"), arg("key"), arg("value"), arg("cos"), arg("sin"), arg("slot_mapping"),
      arg("query_weight").none(), arg("key_weight").none(), arg("query_out"), arg("key_cache"), arg("value_cache"),
      arg("layout"), arg("style"), arg("eps"));
  module.def(
      "convert_pages",
      [](Context& context, const View& from_key, const View& from_value, const View& to_key, const View& to_value,
         const std::string& from, const std::string& to) {
        const ConvertPagesOptions options = {.from = parse_layout(from), .to = parse_layout(to)};
        run([&, k = to_key.output("to_key"), v = to_value.output("to_value")] {
          return convert_pages(context, from_key.input(), from_value.input(), k, v, options);
        });
      },
      arg("context"), arg("from_key"), arg("from_value"), arg("to_key"), arg("to_value"), arg("from_layout"),
      arg("to_layout"));
  module.def(
      "gather_pa_kv_cache",
      [](Context& context, const View& key_cache, const View& value_cache, const View& block_table,
         const View& kv_lengths, const View& key, const View& value, const View* seq_offset, const View* head_indices,
         const std::string& layout, bool cumulative_lengths, bool zero_fill) {
        const GatherOptions options = {.layout = parse_layout(layout),
                                       .cumulative_lengths = cumulative_lengths,
                                       .seq_offset = input_or_empty(seq_offset),
                                       .head_indices = input_or_empty(head_indices),
                                       .zero_fill = zero_fill};
        run([&, k = key.output("key"), v = value.output("value")] {
          return gather_pa_kv_cache(context, key_cache.input(), value_cache.input(), block_table.input(),
                                    kv_lengths.input(), k, v, options);
        });
      },
      arg("context"), arg("key_cache"), arg("value_cache"), arg("block_table"), arg("kv_lengths"), arg("key"),
      arg("value"), arg("seq_offset").none(), arg("head_indices").none(), arg("layout"), arg("cumulative_lengths"),
      arg("zero_fill"));
  bind_pool(module);
}

}  // namespace opst::python
