// The products of `opst bench|plan matmul`: sizes and types of the weight, as options and as a problem.
#pragma once

#include <functional>

#include "command.h"
#include "opst/matmul.h"

namespace opst::tools {

struct MatmulArguments {
  std::vector<int64_t> m = {1, 256}, n = {1024, 4096}, k = {2048};
  std::vector<std::string> dtypes = {"f32", "bf16"};
  int num_threads = 0;
  bool json = false;
};

void add_matmul_options(CLI::App& command, MatmulArguments& arguments);

struct MatmulShape {
  int64_t m, n, k;
};

// A k that the blocks of one of the types do not divide is a usage error. Before anything is printed.
void check_products(const MatmulArguments& arguments);
// Every combination, in the order of a table's rows.
void for_each_product(const MatmulArguments& arguments,
                      const std::function<void(const std::string& dtype, const MatmulShape& shape)>& body);

// A weight of a float type or a quantised format, x of its own type or of f32; i8, i4: x of i8 with a scale per row.
bool is_integers(const std::string& dtype);
DType x_dtype_of(const std::string& dtype);
MatmulProblem matmul_case(const std::string& dtype, const MatmulShape& shape);

}  // namespace opst::tools
