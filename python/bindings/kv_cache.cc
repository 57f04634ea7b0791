#include "opst/kv_cache.h"

#include "view.h"

namespace opst::python {

void bind_kv_cache(nb::module_& module) {
  using nb::arg;
  module.def(
      "scatter_pa_kv_cache",
      [](Context& context, const View& key, const View& value, const View& slots, const View& key_cache,
         const View& value_cache) {
        run([&, k = key_cache.output("key_cache"), v = value_cache.output("value_cache")] {
          return scatter_pa_kv_cache(context, key.input(), value.input(), slots.input(), k, v);
        });
      },
      arg("context"), arg("key"), arg("value"), arg("slot_mapping"), arg("key_cache"), arg("value_cache"));
  module.def(
      "gather_pa_kv_cache",
      [](Context& context, const View& key_cache, const View& value_cache, const View& block_table,
         const View& kv_lengths, const View& key, const View& value, const View* seq_offset) {
        GatherOptions options;
        options.seq_offset = input_or_empty(seq_offset);
        run([&, k = key.output("key"), v = value.output("value")] {
          return gather_pa_kv_cache(context, key_cache.input(), value_cache.input(), block_table.input(),
                                    kv_lengths.input(), k, v, options);
        });
      },
      arg("context"), arg("key_cache"), arg("value_cache"), arg("block_table"), arg("kv_lengths"), arg("key"),
      arg("value"), arg("seq_offset").none());
}

}  // namespace opst::python
