#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "view.h"

namespace opst::python {

void bind_context(nb::module_& module) {
  nb::class_<Context>(module, "Context",
                      "A processor level, a pool of threads and reusable scratch memory. Calls on one Context from "
                      "several threads are legal.")
      .def(
          "__init__",
          [](Context* self, int num_threads, const std::optional<std::string>& isa) {
            ContextOptions options;
            options.num_threads = num_threads;
            if (isa) {
              options.isa = parse_isa(*isa);
              if (!options.isa) raise(PyExc_ValueError, "isa is \"" + *isa + "\", which is no instruction set level");
            }
            if (num_threads < 0) {
              raise(PyExc_ValueError, "num_threads is " + std::to_string(num_threads) + ", must be at least 0");
            }
            // Python hears signals in its main thread; elsewhere PyErr_CheckSignals does nothing.
            options.interrupted = [] {
              const nb::gil_scoped_acquire held;
              return PyErr_CheckSignals() != 0;
            };
            new (self) Context(value_or_raise(Context::create(options)));
          },
          nb::arg("num_threads") = 0, nb::arg("isa") = nb::none(),
          "num_threads 0: OPST_NUM_THREADS, else the cores of this process, at most OMP_NUM_THREADS. isa: at most this "
          "level (generic, avx2, avx512, "
          "avx512_vnni, avx512_bf16).")
      .def_prop_ro("num_threads", &Context::num_threads)
      .def_prop_ro("cores", [](const Context& c) { return c.machine().cores; })
      .def_prop_ro("isa", [](const Context& c) { return to_string(c.machine().isa); })
      .def_prop_ro("machine", [](const Context& c) { return to_string(c.machine()); })
      .def_prop_ro("workspace_bytes", &Context::workspace_bytes)
      .def("trim", &Context::trim, "Gives idle scratch memory back to the system.");
}

}  // namespace opst::python
