#include "opst/kv_cache.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <memory>
#include <utility>

#include "view.h"

namespace opst::python {

namespace {

constexpr DType kPageTypes[] = {DType::f32, DType::bf16,    DType::f16,    DType::i8,
                                DType::u8,  DType::f8_e4m3, DType::f8_e5m2};

// The dtype of pages that exist; of others, which no layout holds, that of f32.
DType page_dtype(const std::string& name) {
  for (const DType dtype : kPageTypes) {
    if (name == to_string(dtype)) return dtype;
  }
  return DType::f32;
}

KvFormat parse_format(const std::string& name, int64_t head_dim, int64_t value_head_dim) {
  Result<KvFormat> format = kv_format(name, head_dim, value_head_dim);
  if (!format.ok()) {
    raise(PyExc_ValueError, "dtype is \"" + name +
                                "\", pages are f32, bf16, f16, f8_e4m3, f8_e5m2, int8, int8_offset, int4 or "
                                "int4_offset");
  }
  return format.value();
}

std::vector<int64_t> shape_of(const Tensor& tensor) { return {tensor.shape, tensor.shape + tensor.rank}; }

// The shapes of a cache in a format of this name (kv_format): keys and values, or the scales of both, which are [] where
// there are none.
using Shapes = std::pair<std::vector<int64_t>, std::vector<int64_t>>;
template <bool kScales>
Shapes shapes(const std::string& layout, const std::string& format_name, int64_t num_blocks, int64_t block_size,
              int64_t num_kv_heads, int64_t head_dim, int64_t value_head_dim) {
  const PageSizes sizes = {num_blocks, block_size, num_kv_heads, head_dim, value_head_dim};
  const PageLayout parsed = parse_layout(layout);
  for (const auto& [name, size] : {std::pair{"num_blocks", num_blocks},
                                   {"block_size", block_size},
                                   {"num_kv_heads", num_kv_heads},
                                   {"head_dim", head_dim},
                                   {"value_head_dim", value_head_dim}}) {
    if (size < 0) raise(PyExc_ValueError, std::string(name) + " is " + std::to_string(size) + ", must not be negative");
  }
  const KvFormat format = parse_format(format_name, head_dim, value_head_dim);
  raise_if_failed(supports(parsed, format.dtype, block_size, head_dim));
  raise_if_failed(supports(parsed, format.dtype, block_size, format.dtype == DType::u8 ? value_head_dim : 0));
  if constexpr (!kScales) {
    return {shape_of(key_pages(parsed, format.dtype, sizes, nullptr)),
            shape_of(value_pages(parsed, format.dtype, sizes, nullptr))};
  }
  if (format.key_groups == 0) return {};
  return {shape_of(key_scale_pages(parsed, sizes, format.key_groups, nullptr)),
          shape_of(value_scale_pages(parsed, sizes, format.value_groups, nullptr))};
}

ConstPageScales read_scales(const View* key, const View* value, const View* key_offsets, const View* value_offsets) {
  return {input_or_empty(key), input_or_empty(value), input_or_empty(key_offsets), input_or_empty(value_offsets)};
}
// Those that are given are only read, whatever the array allows.
PageScales written_scales(const View* key, const View* value, const View* key_offsets, const View* value_offsets,
                          bool given) {
  const auto tensor = [&](const View* view, const char* name) {
    if (view == nullptr) return Tensor();
    return given ? std::bit_cast<Tensor>(view->input()) : view->output(name);
  };
  return {tensor(key, "key_scales"), tensor(value, "value_scales"), tensor(key_offsets, "key_offsets"),
          tensor(value_offsets, "value_offsets")};
}

void bind_page_format(nb::module_& module) {
  using nb::arg;
  nb::class_<PageFormat>(module, "PageFormat")
      .def_ro("rank", &PageFormat::rank)
      .def_prop_ro("dims", [](const PageFormat& f) { return std::vector<std::string>(f.dims, f.dims + f.rank); })
      .def_ro("heads_dim", &PageFormat::heads_dim)
      .def_ro("panel_rows", &PageFormat::panel_rows)
      .def_ro("numbers", &PageFormat::numbers);
  module.def(
      "page_format",
      [](const std::string& layout, const std::string& dtype, const std::string& side) -> const PageFormat& {
        return page_format(parse_layout(layout), page_dtype(dtype), side == "key" ? PageSide::key : PageSide::value);
      },
      arg("layout"), arg("dtype"), arg("side"), nb::rv_policy::reference);
  module.def("page_shapes", &shapes<false>, arg("layout"), arg("dtype"), arg("num_blocks"), arg("block_size"),
             arg("num_kv_heads"), arg("head_dim"), arg("value_head_dim"));
  module.def("scale_shapes", &shapes<true>, arg("layout"), arg("dtype"), arg("num_blocks"), arg("block_size"),
             arg("num_kv_heads"), arg("head_dim"), arg("value_head_dim"));
  // A new array of NumPy, in memory that asks the system for huge pages from 2 MiB on (Buffer).
  module.def(
      "huge_bytes",
      [](int64_t size) {
        auto kept = std::make_unique<Buffer>(value_or_raise(Buffer::allocate(size)));
        void* const data = kept->data();
        const nb::capsule owner(kept.get(), [](void* buffer) noexcept { delete static_cast<Buffer*>(buffer); });
        kept.release();
        const size_t shape[] = {static_cast<size_t>(size)};
        return nb::ndarray<nb::numpy, uint8_t>(data, 1, shape, owner);
      },
      arg("size"));
  // The dtype of a format's pages, and whether it has offsets.
  module.def(
      "kv_format",
      [](const std::string& name) {
        const KvFormat format = parse_format(name, 0, 0);
        return std::pair{std::string(to_string(format.dtype)), format.has_offsets};
      },
      arg("name"));
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
         const View& value_cache, const std::string& layout, const View* key_scales, const View* value_scales,
         const View* key_offsets, const View* value_offsets, bool scales_given) {
        const ScatterOptions options = {
            .layout = parse_layout(layout),
            .scales = written_scales(key_scales, value_scales, key_offsets, value_offsets, scales_given),
            .scales_given = scales_given};
        run([&, k = key_cache.output("key_cache"), v = value_cache.output("value_cache"), o = options] {
          return scatter_pa_kv_cache(context, key.input(), value.input(), slots.input(), k, v, o);
        });
      },
      arg("context"), arg("key"), arg("value"), arg("slot_mapping"), arg("key_cache"), arg("value_cache"),
      arg("layout"), arg("key_scales").none(), arg("value_scales").none(), arg("key_offsets").none(),
      arg("value_offsets").none(), arg("scales_given"));
  module.def(
      "rope_scatter_pa_kv_cache",
      [](Context& context, const View& query, const View& key, const View& value, const View& cos, const View& sin,
         const View& slots, const View* query_weight, const View* key_weight, const View& query_out,
         const View& key_cache, const View& value_cache, const std::string& layout, const std::string& style,
         double eps, const View* key_scales, const View* value_scales, const View* key_offsets,
         const View* value_offsets, bool scales_given) {
        const RopeScatterInputs inputs = {.query = query.input(),
                                          .key = key.input(),
                                          .value = value.input(),
                                          .cos = cos.input(),
                                          .sin = sin.input(),
                                          .slot_mapping = slots.input(),
                                          .query_weight = input_or_empty(query_weight),
                                          .key_weight = input_or_empty(key_weight)};
        const RopeScatterOptions options = {
            .layout = parse_layout(layout),
            .style = parse_style(style),
            .eps = eps,
            .scales = written_scales(key_scales, value_scales, key_offsets, value_offsets, scales_given),
            .scales_given = scales_given};
        run([&, q = query_out.output("query_out"), k = key_cache.output("key_cache"),
             v = value_cache.output("value_cache")] {
          return rope_scatter_pa_kv_cache(context, inputs, q, k, v, options);
        });
      },
      arg("context"), arg("query"), arg("key"), arg("value"), arg("cos"), arg("sin"), arg("slot_mapping"),
      arg("query_weight").none(), arg("key_weight").none(), arg("query_out"), arg("key_cache"), arg("value_cache"),
      arg("layout"), arg("style"), arg("eps"), arg("key_scales").none(), arg("value_scales").none(),
      arg("key_offsets").none(), arg("value_offsets").none(), arg("scales_given"));
  module.def(
      "convert_pages",
      [](Context& context, const View& from_key, const View& from_value, const View& to_key, const View& to_value,
         const std::string& from, const std::string& to, const View* from_key_scales, const View* from_value_scales,
         const View* from_key_offsets, const View* from_value_offsets, const View* to_key_scales,
         const View* to_value_scales, const View* to_key_offsets, const View* to_value_offsets) {
        const ConvertPagesOptions options = {
            .from = parse_layout(from),
            .to = parse_layout(to),
            .from_scales = read_scales(from_key_scales, from_value_scales, from_key_offsets, from_value_offsets),
            .to_scales = written_scales(to_key_scales, to_value_scales, to_key_offsets, to_value_offsets, false)};
        run([&, k = to_key.output("to_key"), v = to_value.output("to_value")] {
          return convert_pages(context, from_key.input(), from_value.input(), k, v, options);
        });
      },
      arg("context"), arg("from_key"), arg("from_value"), arg("to_key"), arg("to_value"), arg("from_layout"),
      arg("to_layout"), arg("from_key_scales").none(), arg("from_value_scales").none(), arg("from_key_offsets").none(),
      arg("from_value_offsets").none(), arg("to_key_scales").none(), arg("to_value_scales").none(),
      arg("to_key_offsets").none(), arg("to_value_offsets").none());
  module.def(
      "gather_pa_kv_cache",
      [](Context& context, const View& key_cache, const View& value_cache, const View& block_table,
         const View& kv_lengths, const View& key, const View& value, const View* seq_offset, const View* head_indices,
         const std::string& layout, bool cumulative_lengths, bool zero_fill, const View* key_scales,
         const View* value_scales, const View* key_offsets, const View* value_offsets) {
        const GatherOptions options = {.layout = parse_layout(layout),
                                       .scales = read_scales(key_scales, value_scales, key_offsets, value_offsets),
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
      arg("zero_fill"), arg("key_scales").none(), arg("value_scales").none(), arg("key_offsets").none(),
      arg("value_offsets").none());
  bind_pool(module);
}

}  // namespace opst::python
