// The extension module ops_transformer._core. Everything in it takes a Context and Views; the package's Python files
// turn arrays into views, make outputs and name layouts.
#include "view.h"

NB_MODULE(_core, module) {
  using namespace opst::python;
  // What torch's registry of operators holds lives until the process ends.
  nanobind::set_leak_warnings(false);
  bind_view(module);
  bind_context(module);
  bind_attention(module);
  bind_block_patterns(module);
  bind_rowwise(module);
  bind_matmul(module);
  bind_kv_cache(module);
  bind_moe(module);
  bind_mc2(module);
  bind_model(module);
}
